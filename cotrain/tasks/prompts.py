"""Prompts as token ids (template, length limit), which of them a step takes, and samples to read."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotrain.records import Prompt, ScoredRollout
from cotrain.tasks.messages import Messages

SAMPLES_PER_STEP = 4


def encode_prompt(tokenizer: Any, prompt: Prompt, max_prompt_tokens: int) -> list[int]:
    """Return token ids with the assistant's turn opened. Raises ValueError if the template fails or the prompt is too long."""
    try:
        token_ids = apply_template(tokenizer, prompt.messages)
    except Exception as error:  # a template is a program, which may fail in any way
        raise ValueError(f"the chat template raises {type(error).__name__}: {error}") from error
    if not 0 < len(token_ids) <= max_prompt_tokens:
        raise ValueError(
            f"prompt {prompt.id} has {len(token_ids)} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}: raise it, "
            "which a resume may do, or leave such prompts out of the task"
        )
    return token_ids


def load_tokenizer(model: Path) -> Any:
    """Load a policy's tokenizer. Raises ValueError naming policy.model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # whatever the files hold
        raise ValueError(f"policy.model: the tokenizer in {model} cannot be loaded: {error}") from error


def apply_template(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of chat messages, with the assistant's turn opened after them."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


class PromptOrder:
    """Which prompts each step takes: a function of the seed and the step alone, so that a resume needs no state.

    The prompts are reshuffled each epoch, and none comes twice in an epoch. Its last num_prompts % prompts_per_step prompts
    are left out, since a step that mixes two epochs could hold one prompt twice.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, seed: int) -> None:
        self._num_prompts, self._prompts_per_step, self._seed = num_prompts, prompts_per_step, seed
        self._epoch, self._order = -1, list[int]()

    def step(self, step: int) -> list[int]:
        """Return the indices of the prompts of a step, counted from 1."""
        epoch, batch = divmod(step - 1, self._num_prompts // self._prompts_per_step)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._num_prompts))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[batch * self._prompts_per_step : (batch + 1) * self._prompts_per_step]


def write_samples(path: Path, rollouts: list[ScoredRollout], prompts: Mapping[str, Prompt], tokenizer: Any) -> None:
    """Write a step's first rollouts as text for people to read, one JSON object a line. prompts: those of the step by id."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for scored in rollouts[:SAMPLES_PER_STEP]:
            rollout = scored.rollout
            row = {
                "prompt": tokenizer.decode(rollout.prompt_token_ids),
                "response": rollout.text,
                "answer": plain_answer(prompts[rollout.prompt_id]),
                "reward": scored.reward,
                "advantage": scored.advantage,
                "finish_reason": rollout.finish_reason,
                "versions": str(rollout.versions),
                "acceptance_length": rollout.speculation.acceptance_length if rollout.speculation else None,
            }
            file.write(json.dumps(row, default=str) + "\n")


def plain_answer(prompt: Prompt) -> Any:
    """Return a prompt's answer for people to read; of a generated problem, without what only its verifier needs."""
    return prompt.answer.get("answer", prompt.answer) if isinstance(prompt.answer, dict) else prompt.answer
