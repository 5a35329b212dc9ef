"""Scores the policy on prompts that it is not trained on, on the engines, between two steps."""

from math import sqrt
from typing import Any

import numpy as np

from cotrain.config.schema import RunConfig
from cotrain.loop.roles import Roles
from cotrain.process.failures import TaskFailed
from cotrain.records import RolloutRequest
from cotrain.tasks.base import build_task
from cotrain.tasks.prompts import encode_prompt


class Validation:
    """The prompts of the [validation] table, and the scores of the policy on them."""

    def __init__(self, config: RunConfig, roles: Roles, tokenizer: Any):
        """Raises ValueError when a prompt cannot be encoded."""
        assert config.validation is not None
        self._roles, self._every, self._last = roles, config.validation.every, config.steps
        held_out = config.on_validation()
        task, longest = build_task(held_out.task, held_out.seed), config.rollout.max_prompt_tokens
        self._prompts = [task[i] for i in range(min(config.validation.num_prompts, len(task)))]
        self._samples = config.validation.samples_per_prompt
        self._requests = [
            RolloutRequest(prompt.id, sample, encode_prompt(tokenizer, prompt, longest), None)
            for prompt in self._prompts
            for sample in range(self._samples)
        ]
        temperature = config.validation.temperature
        self._sampling = {"temperature": temperature} | ({} if temperature else {"top_p": 1.0, "top_k": -1})
        self.failure: TaskFailed | None = None
        assert roles.validation is not None
        roles.reactor.add(roles.validation.starting, lambda _: None)

    def due(self, step: int) -> bool:
        """Whether the policy is to be scored after this step."""
        return step % self._every == 0 or step == self._last

    def metrics(self) -> dict[str, float]:
        """Score the policy that the engines serve. The standard error is over prompts.

        If the reward raises, there are no metrics, and `failure` is to end the run once the step, which has trained, is recorded.
        """
        rollouts = self._roles.engines.generate(self._requests, **self._sampling)
        assert self._roles.validation is not None
        results: list[list[float] | TaskFailed] = []
        for i, prompt in enumerate(self._prompts):  # responses come in the order of the requests
            texts = [rollout.text for rollout in rollouts[i * self._samples : (i + 1) * self._samples]]
            self._roles.reactor.add(self._roles.validation.begin(prompt, texts), results.append)
        self._roles.reactor.until(lambda: len(results) == len(self._prompts))
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
