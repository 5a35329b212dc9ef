"""Scores the policy on prompts that it is not trained on, on the engines, between two steps."""

from typing import Any

from cotrain.actors.engines import RolloutEngines
from cotrain.actors.rewards import Rewards
from cotrain.config.schema import RunConfig
from cotrain.loop.reactor import Reactor
from cotrain.process.failures import TaskFailed
from cotrain.tasks.held_out import HeldOut


class Validation:
    """The held-out prompts of a run, the process that scores responses to them, and the scores of the policy."""

    def __init__(self, config: RunConfig, rewards: Rewards, reactor: Reactor, tokenizer: Any):
        """Raises ValueError when a prompt cannot be encoded."""
        assert config.validation is not None
        self._every, self._last, self.held_out = config.validation.every, config.steps, HeldOut(config, tokenizer)
        self.rewards, self._reactor = rewards, reactor
        self.failure: TaskFailed | None = None
        reactor.add(rewards.starting, lambda _: None)

    def due(self, step: int) -> bool:
        """Whether the policy is to be scored after this step."""
        return step % self._every == 0 or step == self._last

    def metrics(self, engines: RolloutEngines) -> dict[str, float]:
        """Score the policy that the engines serve.

        If the reward raises, there are no metrics, and `failure` is to end the run once the step, which has trained, is recorded.
        """
        held_out, results = self.held_out, list[list[float] | TaskFailed]()
        rollouts = engines.generate(held_out.requests, **held_out.sampling)  # in the order of the requests
        for prompt, texts in held_out.responses(rollouts):
            self._reactor.add(self.rewards.begin(prompt, texts), results.append)
        self._reactor.until(lambda: len(results) == len(held_out.prompts))
        self.failure = next((result for result in results if isinstance(result, TaskFailed)), None)
        if self.failure is not None:
            return {}
        figures = held_out.figures(rollouts, [rewards for rewards in results if not isinstance(rewards, TaskFailed)])
        return {f"validation/{name}": value for name, value in figures.items()}
