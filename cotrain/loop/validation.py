"""Scores the policy on prompts that it is not trained on, on the engines, between two steps."""

from cotrain.actors.engines import RolloutEngines
from cotrain.actors.rewards import Rewards
from cotrain.config.schema import RunConfig
from cotrain.engine.tools import Tools
from cotrain.loop.reactor import Reactor
from cotrain.process.failures import TaskFailed
from cotrain.records import Rollout
from cotrain.tasks.held_out import HeldOut


class Validation:
    """The held-out prompts of a run, the process that scores responses to them or plays them, and the scores of the policy."""

    def __init__(self, config: RunConfig, held_out: HeldOut, scorer: Rewards | Tools, reactor: Reactor):
        """Raises ValueError when a prompt cannot be encoded."""
        assert config.validation is not None
        self._every, self._last, self.held_out = config.validation.every, config.steps, held_out
        self.scorer, self._reactor = scorer, reactor
        self.failure: TaskFailed | None = None
        if not isinstance(scorer, Tools):
            reactor.add(scorer.starting, lambda _: None)

    def due(self, step: int) -> bool:
        """Whether the policy is to be scored after this step."""
        return step % self._every == 0 or step == self._last

    def metrics(self, engines: RolloutEngines) -> dict[str, float]:
        """Score the policy that the engines serve.

        If the reward raises, or an environment fails all trajectories of a prompt, there are no metrics, and `failure` is to end the run
        once the step, which has trained, is recorded.
        """
        rollouts, results = (self._played if isinstance(self.scorer, Tools) else self._scored)(engines)
        self.failure = next((result for result in results if isinstance(result, TaskFailed)), None)
        if self.failure is not None:
            return {}
        rewards = [result for result in results if not isinstance(result, TaskFailed)]
        return {f"validation/{name}": value for name, value in self.held_out.figures(rollouts, rewards).items()}

    def _scored(self, engines: RolloutEngines) -> tuple[list[Rollout], list[list[float] | TaskFailed]]:
        held_out, results = self.held_out, list[list[float] | TaskFailed]()
        rollouts = engines.generate(held_out.requests, **held_out.sampling)  # in the order of the requests
        assert not isinstance(self.scorer, Tools)
        for prompt, texts in held_out.responses(rollouts):
            self._reactor.add(self.scorer.begin(prompt, texts), results.append)
        self._reactor.until(lambda: len(results) == len(held_out.prompts))
        return rollouts, results

    def _played(self, engines: RolloutEngines) -> tuple[list[Rollout], list[list[float] | TaskFailed]]:
        assert isinstance(self.scorer, Tools)
        batches = engines.play(
            self.held_out.by_prompt, [prompt.answer for prompt in self.held_out.prompts], self.scorer
        )
        failed = "validation.task: the tools of a held-out prompt failed in all of its trajectories: "
        results = [batch.rewards or TaskFailed(failed + batch.failures[-1]) for batch in batches]
        return [rollout for batch in batches for rollout in batch.rollouts], results
