"""From a task's prompt to token ids: chat template, length limit, and the prompts in flight."""

from typing import Any

from cotrain.records import Prompt


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
