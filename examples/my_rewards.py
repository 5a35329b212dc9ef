# my_rewards.py, in the folder in which you start `cotrain train`;  task.reward = "my_rewards:score"
import re


def score(prompt, response, answer):
    """1 for the right number, and half of it if the response is longer than the question asks for."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers or int(numbers[-1]) != answer:
        return 0.0
    limit = re.search(r"at most (\d+) words", prompt[-1]["content"])
    return 1.0 if limit is None or len(response.split()) <= int(limit[1]) else 0.5
