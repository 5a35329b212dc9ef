"""Turn questions into token ids (chat messages, template, length limit), order the prompts, and write samples to read."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotrain.records import Prompt, ScoredRollout

Messages = list[dict[str, str]]

SAMPLES_PER_STEP = 4


def chat_messages(question: str | Messages, instruction: str, system_prompt: str) -> Messages:
    """Return the question as chat messages, with the instruction on a line below it.

    A text becomes one user message. Messages stay as they are, except that a system prompt replaces their own.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    if instruction:
        messages[-1]["content"] += f"\n{instruction}"
    if not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]


def encode_prompt(tokenizer: Any, prompt: Prompt, max_prompt_tokens: int) -> list[int]:
    """Return token ids with the assistant's turn opened. Raises ValueError for a prompt over the limit."""
    token_ids = apply_template(tokenizer, prompt.messages)
    if len(token_ids) > max_prompt_tokens:
        raise ValueError(
            f"prompt {prompt.id} has {len(token_ids)} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}: raise it, "
            "or leave such prompts out of the task"
        )
    return token_ids


def apply_template(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of chat messages, with the assistant's turn opened after them."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


class PromptOrder:
    """Which prompts each step takes: a function of the seed and the step alone, so that a resume needs no state.

    The prompts are reshuffled each epoch, and none comes twice in an epoch. Its last num_prompts % prompts_per_step prompts
    are left out, since a step that mixes two epochs could hold one prompt twice.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, seed: int) -> None:
        if prompts_per_step > num_prompts:
            raise ValueError(
                f"rollout.prompts_per_step = {prompts_per_step} is more than the {num_prompts} prompts of the task; "
                "lower it, or raise task.size"
            )
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
            answer = prompts[rollout.prompt_id].answer
            row = {
                "prompt": tokenizer.decode(rollout.prompt_token_ids),
                "response": rollout.text,
                "answer": answer.get("answer", answer) if isinstance(answer, dict) else answer,
                "reward": scored.reward,
                "advantage": scored.advantage,
                "finish_reason": rollout.finish_reason,
                "versions": str(rollout.versions),
                "acceptance_length": rollout.speculation.acceptance_length if rollout.speculation else None,
            }
            file.write(json.dumps(row, default=str) + "\n")
