"""How a question becomes chat messages."""


def chat_messages(
    question: str | list[dict[str, str]], instruction: str, system_prompt: str | None
) -> list[dict[str, str]]:
    """System message, then the question (one user message, or messages as they are), instruction on a line below it.

    Raises ValueError when the messages bring a system message of their own beside system_prompt.
    """
    if isinstance(question, str):
        messages = [{"role": "user", "content": question}]
    else:
        messages = [{"role": message["role"], "content": message["content"]} for message in question]
    if instruction:
        messages[-1]["content"] += f"\n{instruction}"
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("task.system_prompt: the prompts already begin with a system message; leave one of them out")
    return [{"role": "system", "content": system_prompt}, *messages]
