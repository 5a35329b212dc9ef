"""Questions become chat messages here."""

Messages = list[dict[str, str]]


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
