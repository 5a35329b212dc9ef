"""How a question becomes chat messages."""


def chat_messages(question: str | list[dict[str, str]], instruction: str) -> list[dict[str, str]]:
    """Return the question as chat messages, with the instruction on a line below it.

    A text is one user message; messages stay as they are.
    """
    if isinstance(question, str):
        messages = [{"role": "user", "content": question}]
    else:
        messages = [{"role": message["role"], "content": message["content"]} for message in question]
    if instruction:
        messages[-1]["content"] += f"\n{instruction}"
    return messages
