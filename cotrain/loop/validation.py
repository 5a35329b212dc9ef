"""Scores the policy on prompts that it is not trained on, on the engines, between two steps."""

from math import sqrt
from typing import Any

import numpy as np

from cotrain.actors.engines import RolloutEngines
from cotrain.actors.rewards import Rewards
from cotrain.config.schema import RunConfig
from cotrain.loop.reactor import Reactor
from cotrain.process.failures import TaskFailed
from cotrain.records import RolloutRequest
from cotrain.tasks.base import build_task
from cotrain.tasks.prompts import encode_prompt


class Validation:
    """The prompts of the [validation] table, the process that scores responses to them, and the scores of the policy."""

    def __init__(self, config: RunConfig, rewards: Rewards, reactor: Reactor, tokenizer: Any):
        """Raises ValueError when a prompt cannot be encoded."""
        fields, held_out, longest = config.validation, config.held_out, config.rollout.max_prompt_tokens
        assert fields is not None and held_out is not None
        self._fields, self._last, self.rewards, self._reactor = fields, config.steps, rewards, reactor
        task = build_task(held_out.task, held_out.seed)
        self._prompts = [task[i] for i in range(min(fields.num_prompts, len(task)))]
        self._requests = [
            RolloutRequest(prompt.id, sample, encode_prompt(tokenizer, prompt, longest), None)
            for prompt in self._prompts
            for sample in range(fields.samples_per_prompt)
        ]
        self.failure: TaskFailed | None = None
        reactor.add(rewards.starting, lambda _: None)

    def due(self, step: int) -> bool:
        """Whether the policy is to be scored after this step."""
        return step % self._fields.every == 0 or step == self._last

    def metrics(self, engines: RolloutEngines) -> dict[str, float]:
        """Score the policy that the engines serve. The standard error is over prompts.

        If the reward raises, there are no metrics, and `failure` is to end the run once the step, which has trained, is recorded.
        """
        temperature, samples = self._fields.temperature, self._fields.samples_per_prompt
        sampling = {"temperature": temperature} | ({} if temperature else {"top_p": 1.0, "top_k": -1})
        rollouts = engines.generate(self._requests, **sampling)  # in the order of the requests
        results: list[list[float] | TaskFailed] = []
        for i, prompt in enumerate(self._prompts):
            texts = [rollout.text for rollout in rollouts[i * samples : (i + 1) * samples]]
            self._reactor.add(self.rewards.begin(prompt, texts), results.append)
        self._reactor.until(lambda: len(results) == len(self._prompts))
        self.failure = next((result for result in results if isinstance(result, TaskFailed)), None)
        if self.failure is not None:
            return {}
        means = np.array(results).mean(axis=1)
        return {
            "validation/reward": float(means.mean()),
            "validation/reward_error": float(means.std(ddof=1) / sqrt(len(means))) if len(means) > 1 else 0.0,
            "validation/response_length": float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
            "validation/truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        }
