"""How a question becomes chat messages."""

Messages = list[dict[str, str]]


def chat_messages(question: str | Messages, instruction: str, system_prompt: str | None) -> Messages:
    """System message, then the question (one user message, or messages as they are), instruction on a line below it.

    Raises ValueError when the messages bring a system message of their own beside system_prompt.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    if instruction:
        messages[-1]["content"] += f"\n{instruction}"
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("task.system_prompt: the prompts already begin with a system message; leave one of them out")
    return [{"role": "system", "content": system_prompt}, *messages]
