"""Chat messages: read from a cell of a data set, and checked one by one, so that a template gets what the data set says."""

import json
import re
import reprlib
from typing import Any

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
