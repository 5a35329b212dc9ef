"""Prompts: chat messages read from a cell of a data set, their token ids, which of them a step takes, and samples to read."""

import json
import random
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotrain.records import Prompt, ScoredRollout

Messages = list[dict[str, str]]

LIKE_MESSAGES = re.compile(r"""\[?\s*\{.*['"](?:role|content)['"]\s*:.*\}\s*\]?""", re.DOTALL)
"""A text that is wholly made of messages, as JSON or as Python prints them."""


def chat_messages(question: str | Messages, instruction: str, system_prompt: str) -> Messages:
    """Return the question as chat messages, with the instruction on a line below it. A system prompt replaces their own."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
    if instruction:
        messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}\n{instruction}"}
    if not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]


def split_question(cell: Any) -> tuple[Messages, str | None]:
    """Return a cell's messages, and the text of a last one of the assistant or None. Raises ValueError for a bad cell."""
    messages = read_messages(cell)
    answer = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
    if not messages or not messages[-1]["content"].strip():
        raise ValueError("it has no prompt")
    return messages, answer


def read_messages(cell: Any) -> Messages:
    """Read a text (one user message), a list of messages, or JSON text of one. Raises ValueError naming the bad message."""
    if isinstance(cell, str) and LIKE_MESSAGES.fullmatch(cell.strip()):
        try:
            cell = json.loads(cell)
        except ValueError:
            raise ValueError("its prompt is a text that looks like messages, but is not JSON") from None
    if isinstance(cell, str):
        return [{"role": "user", "content": cell}]
    if not isinstance(cell, list):
        raise ValueError(f"its prompt is neither a text nor a list of messages, but {reprlib.repr(cell)}")
    messages: Messages = []
    for number, message in enumerate(cell):
        where, fields = f"message {number} of its prompt", message if isinstance(message, dict) else {}
        role, content = fields.get("role") or None, fields.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
        if not all(isinstance(text, str) for text in (role, *texts)):
            raise ValueError(f"{where} needs role and content, both of text alone, and is {reprlib.repr(message)}")
        if fields.get("tool_calls"):
            raise ValueError(f"{where} has tool calls, which would be lost")
        messages.append({"role": str(role), "content": "".join(map(str, texts))})
    return messages


def encode_prompt(tokenizer: Any, prompt: Prompt, max_prompt_tokens: int) -> list[int]:
    """Return token ids with the assistant's turn opened. Raises ValueError if the template fails or the prompt is too long."""
    try:
        token_ids = apply_template(tokenizer, prompt.messages, prompt.tools)
        leaves_out = prompt.tools and token_ids == apply_template(tokenizer, prompt.messages)
    except Exception as error:  # a template is a program, which may fail in any way
        raise ValueError(f"the chat template raises {type(error).__name__}: {error}") from error
    if leaves_out:
        raise ValueError(
            f"policy.model: its chat template does not write the tools of prompt {prompt.id}; take one that does"
        )
    if not 0 < len(token_ids) <= max_prompt_tokens:
        what = f"prompt {prompt.id} has {len(token_ids)} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}"
        raise ValueError(f"{what}: raise it, which a resume may do, or leave such prompts out of the task")
    return token_ids


def load_tokenizer(model: Path) -> Any:
    """Load a policy's tokenizer. Raises ValueError naming policy.model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # whatever the files hold
        raise ValueError(f"policy.model: the tokenizer in {model} cannot be loaded: {error}") from error


def apply_template(tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Return the token ids of chat messages, with the assistant's turn opened after them. tools: JSON schemas."""
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(messages, tools=tools or None, **options))


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
        return [self.prompt(step, place) for place in range(self._prompts_per_step)]

    def prompt(self, step: int, place: int) -> int:
        """Return the index of one prompt of a step."""
        epoch, batch = divmod(step - 1, self._num_prompts // self._prompts_per_step)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._num_prompts))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[batch * self._prompts_per_step + place]


def write_samples(path: Path, rollouts: list[ScoredRollout], prompts: Mapping[str, Prompt], tokenizer: Any) -> None:
    """Write rollouts as text for people to read, one JSON object a line. prompts: theirs, by id."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for scored in rollouts:
            rollout = scored.rollout
            row = {
                "prompt": tokenizer.decode(rollout.prompt_token_ids),
                "response": tokenizer.decode(rollout.token_ids) if rollout.parts else rollout.text,
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
