"""The task that a configuration asks for."""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from cotrain.config.schema import DatasetTask, EnvironmentTask, ReasoningGymTask
from cotrain.records import Prompt
from cotrain.tasks.datasets import read_prompts
from cotrain.tasks.environments import EnvironmentPrompts
from cotrain.tasks.prompts import load_tokenizer, plain_answer
from cotrain.tasks.reasoning import NUM_CHECKED, ReasoningGymProblems
from cotrain.tasks.rewards import load_reward

Task = ReasoningGymProblems | EnvironmentPrompts | list[Prompt]
"""A fixed sequence of prompts, which are the same at every call and in every process."""


@lru_cache(maxsize=2)
def build_task(
    config: ReasoningGymTask | DatasetTask | EnvironmentTask,
    seed: int,
    model: Path | None = None,
    max_prompt_tokens: int = 0,
) -> Task:
    """Build the task of the [task] table. It is cached, so that the check of a run and its start build it once.

    model: folder of the policy, with whose tokenizer to check that prompts can be encoded, in max_prompt_tokens at most. Raises
    ValueError naming the field when the task, file, column or reward is not there, or when rows cannot be used.
    """
    tokenizer = None if model is None else load_tokenizer(model)
    if isinstance(config, ReasoningGymTask):
        return ReasoningGymProblems(config, seed, tokenizer, max_prompt_tokens)
    if isinstance(config, EnvironmentTask):
        return EnvironmentPrompts(config, seed, tokenizer, max_prompt_tokens)
    return read_prompts(config, tokenizer, max_prompt_tokens)


def fingerprint(task: Task) -> str:
    """Return a digest of all prompts and answers, or for generated problems of the first ones."""
    count = len(task) if isinstance(task, list) else min(NUM_CHECKED, len(task))
    prompts = [(prompt.id, prompt.messages, plain_answer(prompt)) for prompt in map(task.__getitem__, range(count))]
    return hashlib.blake2b(repr((len(task), prompts)).encode(), digest_size=16).hexdigest()


def build_score(
    config: ReasoningGymTask | DatasetTask | EnvironmentTask, seed: int
) -> Callable[[Prompt, list[str]], list[float]]:
    """Return the function that scores all responses to a prompt of the task. Raises ValueError naming task.reward."""
    assert not isinstance(config, EnvironmentTask), "environments compute their own rewards"
    if isinstance(config, ReasoningGymTask):
        verify = ReasoningGymProblems(config, seed).score
        return lambda prompt, responses: [verify(prompt, response) for response in responses]
    rewards = [load_reward(name) for name in config.reward]
    weights = config.reward_weights or [1.0] * len(rewards)

    def score(prompt: Prompt, responses: list[str]) -> list[float]:
        scores = zip(*(reward(prompt, responses) for reward in rewards), strict=True)
        return [sum(weight * one for weight, one in zip(weights, of, strict=True) if one is not None) for of in scores]

    return score
