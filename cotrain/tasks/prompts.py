"""From a question to token ids (chat messages, template, length limit), the prompts in flight, and samples to read."""

import json
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
    """Applies the policy's chat template, and remembers prompts until their rollouts are scored."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int):
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._prompts: dict[str, Prompt] = {}

    @property
    def eos_token_id(self) -> int | None:
        """Return the token that ends a response."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    def encode(self, prompt: Prompt) -> list[int]:
        """Return token ids with the assistant's turn opened. Raises ValueError for a prompt over the limit."""
        token_ids = self._tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(token_ids) > self._max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(token_ids)} tokens, rollout.max_prompt_tokens is "
                f"{self._max_prompt_tokens}: raise it, or leave such prompts out of the task"
            )
        return list(token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens shown."""
        return self._tokenizer.decode(token_ids)

    def remember(self, prompt: Prompt) -> None:
        """Keep a prompt for scoring."""
        self._prompts[prompt.id] = prompt

    def prompt(self, prompt_id: str) -> Prompt:
        """Return a remembered prompt."""
        return self._prompts[prompt_id]

    def forget_all(self) -> None:
        """Drop the prompts of the last step."""
        self._prompts.clear()


def write_samples(path: Path, rollouts: list[ScoredRollout], prompts: PromptEncoder) -> None:
    """Write the first rollouts of a step as text for a reader, one JSON object a line."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for scored in rollouts[:SAMPLES_PER_STEP]:
            rollout = scored.rollout
            answer = prompts.prompt(rollout.prompt_id).answer
            row = {
                "prompt": prompts.decode(rollout.prompt_token_ids),
                "response": rollout.text,
                "answer": answer.get("answer", answer) if isinstance(answer, dict) else answer,
                "reward": scored.reward,
                "advantage": scored.advantage,
                "finish_reason": rollout.finish_reason,
                "versions": str(rollout.versions),
                "acceptance_length": rollout.speculation.acceptance_length if rollout.speculation else None,
            }
            file.write(json.dumps(row, default=str) + "\n")
