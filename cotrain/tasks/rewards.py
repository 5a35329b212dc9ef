"""Rewards of dataset tasks: the built-in ones, and a user's function, whose errors show the user's own lines."""

import inspect
import math
import os
import pkgutil
import reprlib
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cotrain.process.failures import TaskFailed
from cotrain.records import Prompt
from cotrain.tasks.answers import extract_answer, extract_number, number_in
from cotrain.tasks.prompts import Messages

Reward = Callable[[Messages, str, Any], float]  # (prompt messages, response, answer) -> finite float

NOT_THE_USERS = ("cotrain", "pipelines", "drafters", "importlib", "pkgutil")
"""Packages whose frames are left out of the traceback of a user's function."""

shortened = reprlib.Repr()
shortened.maxstring = shortened.maxother = 400


def exact(prompt: Messages, response: str, answer: Any) -> float:
    """Return 1 if the final answer equals the answer: a number by its value, a text apart from white space and a final full stop."""
    final = _plain(extract_answer(response))
    return float(final == _plain(answer)) if isinstance(answer, str) else _same_number(final, answer)


def numeric(prompt: Messages, response: str, answer: Any) -> float:
    """Return 1 when the final number has the value of the answer."""
    return _same_number(extract_number(response), answer)


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


def _same_number(text: str, answer: Any) -> float:
    value = number_in(text)
    return float(value is not None and value == number_in(answer))


def math_verify(prompt: Messages, response: str, answer: Any) -> float:
    r"""Return 1 when math-verify finds the response's expression equal to the answer.

    It reads an answer as LaTeX only where that is marked: without \boxed, 2\pi would be 2, and \sqrt{2} nothing. Its time limit
    of five seconds uses a signal, which Python delivers to the main thread only; in other threads it raises.
    """
    from math_verify import parse, verify

    value = number_in(answer)
    text = str(answer) if value is None else str(value)
    return float(verify(parse(text if "$" in text or r"\boxed" in text else rf"\boxed{{{text}}}"), parse(response)))


REWARDS: dict[str, Reward] = {"exact": exact, "numeric": numeric, "math_verify": math_verify}


def check_answer(reward: str, answer: Any) -> None:
    """Raise ValueError when the built-in reward of this name could never pay for an answer. Users' own may take anything."""
    is_text = isinstance(answer, str) and _plain(answer) != ""
    if reward in REWARDS and number_in(answer) is None and (reward == "numeric" or not is_text):
        needed = "wholly one number" if reward == "numeric" else "a text or a number"
        raise ValueError(f"its answer {reprlib.repr(answer)} is not {needed}, as task.reward = '{reward}' needs")


def load_reward(name: str) -> Reward:
    """Return the reward called name in task.reward: a key of REWARDS, or package.module:function of a user.

    The module may lie in the working folder. Raises ValueError naming task.reward when the function cannot be imported or called
    with (prompt, response, answer). What it returns is checked at every call to be a finite number.
    """
    if name in REWARDS:
        return REWARDS[name]
    # For a console script, sys.path starts with the script's own folder, not with the working folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = pkgutil.resolve_name(name)
        inspect.signature(function).bind([], "", "")
    except (Exception, SystemExit) as error:  # the user's module runs here
        raise ValueError(
            f"task.reward: {name} is neither {', '.join(REWARDS)} nor a function (prompt, response, answer) that can "
            f"be imported as package.module:function ({type(error).__name__}: {error}){_users_frames(error)}"
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"task.reward: {name} is async; it must return the number itself")

    def reward(prompt: Messages, response: str, answer: Any) -> float:
        value = function(prompt, response, answer)
        with suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                return number
        raise ValueError(f"task.reward: {name} must return a finite number, got {value!r} for {response[:80]!r}")

    return reward


def reward_failure(error: BaseException, prompt: Prompt, response: str) -> TaskFailed:
    """Return what a user needs to mend a reward function that has raised: their own lines, the prompt and the response."""
    return TaskFailed(
        f"task.reward raised {type(error).__name__}: {error}{_users_frames(error)}\n"
        f"  prompt {prompt.id}: {shortened.repr(prompt.messages[-1]['content'])}\n  response: {shortened.repr(response)}"
    )


def _users_frames(error: BaseException) -> str:
    """The frames of a traceback as Python prints them, without ours and those of the import."""
    walk = traceback.walk_tb(error.__traceback__)
    names = ((frame.f_globals.get("__name__", ""), (frame, line)) for frame, line in walk)
    frames = [place for name, place in names if name.partition(".")[0] not in NOT_THE_USERS]
    return "".join(["\n", *traceback.StackSummary.extract(frames).format()]).rstrip()
