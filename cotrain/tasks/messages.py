"""Questions become chat messages here."""

Messages = list[dict[str, str]]


def chat_messages(question: str | Messages, instruction: str) -> Messages:
    """Return the question as chat messages, with the instruction on a line below it.

    A text is one user message; messages stay as they are.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    if instruction:
        messages[-1]["content"] += f"\n{instruction}"
    return messages
