"""The prompts of [validation], which a policy is scored on and not trained on."""

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import numpy as np

from cotrain.config.schema import RunConfig
from cotrain.records import Prompt, Rollout, RolloutRequest
from cotrain.tasks.base import build_task
from cotrain.tasks.prompts import encode_prompt


class HeldOut:
    """The prompts, the requests for responses to them, and the figures of a policy that has answered."""

    def __init__(self, config: RunConfig, tokenizer: Any):
        """Raises ValueError when a prompt cannot be encoded."""
        fields, held_out, longest = config.validation, config.held_out, config.rollout.max_prompt_tokens
        assert fields is not None and held_out is not None
        self.samples, task = fields.samples_per_prompt, build_task(held_out.task, held_out.seed)
        self.prompts = [task[i] for i in range(min(fields.num_prompts, len(task)))]
        self.requests = [
            RolloutRequest(prompt.id, sample, encode_prompt(tokenizer, prompt, longest), None)
            for prompt in self.prompts
            for sample in range(self.samples)
        ]
        self.sampling: dict[str, Any] = {"temperature": fields.temperature}
        if not fields.temperature:
            self.sampling |= {"top_p": 1.0, "top_k": -1}

    @property
    def by_prompt(self) -> list[list[RolloutRequest]]:
        """The requests of each prompt."""
        return [self.requests[i : i + self.samples] for i in range(0, len(self.requests), self.samples)]

    def responses(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[Prompt, list[str]]]:
        """Yield each prompt with its responses. rollouts: in the order of the requests."""
        for i, prompt in enumerate(self.prompts):
            yield prompt, [rollout.text for rollout in rollouts[i * self.samples : (i + 1) * self.samples]]

    def figures(self, rollouts: Sequence[Rollout], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return means over all responses. rewards: of each prompt's responses. The standard error of their mean is over prompts."""
        means = np.array([np.mean(of_prompt) for of_prompt in rewards])
        return {
            "reward": float(means.mean()),
            "reward_error": float(means.std(ddof=1) / sqrt(len(means))) if len(means) > 1 else 0.0,
            "response_length": float(np.mean([rollout.num_generated for rollout in rollouts])),
            "truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        }
