"""From a question to token ids (chat messages, template, length limit), the order of prompts, and samples to read."""

import json
import random
from pathlib import Path
from typing import Any

from cotrain.records import Prompt, ScoredRollout

Messages = list[dict[str, str]]

SAMPLES_PER_STEP = 4


def chat_messages(question: str | Messages, instruction: str, system_prompt: str) -> Messages:
    """Return the question as chat messages, with the instruction on a line below it.

    A text is one user message; messages stay as they are, but a system prompt takes the place of theirs.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    if instruction:
        messages[-1]["content"] += f"\n{instruction}"
    if not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]


class PromptEncoder:
    """Applies the policy's chat template, and holds the prompts of a step until their rollouts are scored."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int):
        self.tokenizer = tokenizer
        self.in_flight: dict[str, Prompt] = {}
        """Prompts of the step, by id."""
        self._max_prompt_tokens = max_prompt_tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """Return token ids with the assistant's turn opened. Raises ValueError for a prompt over the limit."""
        token_ids = apply_template(self.tokenizer, prompt.messages)
        if len(token_ids) > self._max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(token_ids)} tokens, rollout.max_prompt_tokens is "
                f"{self._max_prompt_tokens}: raise it, or leave such prompts out of the task"
            )
        return token_ids


def apply_template(tokenizer: Any, messages: Messages, open_turn: bool = True) -> list[int]:
    """Return the token ids of chat messages. open_turn: the assistant's turn is opened behind them."""
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=open_turn, tokenize=True, return_dict=False)
    )


class PromptOrder:
    """Batches of prompt indices, reshuffled each epoch; no index comes twice in an epoch.

    An epoch's last num_prompts % prompts_per_step indices are left out, so that no batch mixes two epochs and holds
    one prompt twice. The shuffle depends only on (seed, epoch), so that {"epoch", "position"} is the whole state.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, seed: int) -> None:
        if prompts_per_step > num_prompts:
            raise ValueError(
                f"rollout.prompts_per_step = {prompts_per_step} is more than the {num_prompts} prompts of the task; "
                "lower it, or raise task.size"
            )
        self._num_prompts, self._prompts_per_step, self._seed = num_prompts, prompts_per_step, seed
        self.restore({"epoch": 0, "position": 0})

    def next(self) -> list[int]:
        """Return the indices of the next step's prompts."""
        if self._position + self._prompts_per_step > self._num_prompts:
            self.restore({"epoch": self._epoch + 1, "position": 0})
        batch = self._order[self._position : self._position + self._prompts_per_step]
        self._position += self._prompts_per_step
        return batch

    def state(self) -> dict[str, int]:
        """Return what restore needs: the epoch, and how many of its indices were handed out."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue after the batch at which state() was taken."""
        if not 0 <= state["position"] <= self._num_prompts:
            raise ValueError(f"position {state['position']} lies outside the task's {self._num_prompts} prompts")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = list(range(self._num_prompts))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)


def write_samples(path: Path, rollouts: list[ScoredRollout], prompts: PromptEncoder) -> None:
    """Write the first rollouts of a step as text for a reader, one JSON object a line."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for scored in rollouts[:SAMPLES_PER_STEP]:
            rollout = scored.rollout
            answer = prompts.in_flight[rollout.prompt_id].answer
            row = {
                "prompt": prompts.tokenizer.decode(rollout.prompt_token_ids),
                "response": rollout.text,
                "answer": answer.get("answer", answer) if isinstance(answer, dict) else answer,
                "reward": scored.reward,
                "advantage": scored.advantage,
                "finish_reason": rollout.finish_reason,
                "versions": str(rollout.versions),
                "acceptance_length": rollout.speculation.acceptance_length if rollout.speculation else None,
            }
            file.write(json.dumps(row, default=str) + "\n")
