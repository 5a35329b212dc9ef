"""Rewards of dataset tasks: the built-in ones, and users' functions, whose errors show the user's own lines."""

import inspect
import math
import os
import pkgutil
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from cotrain.process.failures import TaskFailed
from cotrain.records import Prompt
from cotrain.tasks.answers import extract_answer, extract_number, number_in
from cotrain.tasks.prompts import Messages

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


REWARDS = {"exact": exact, "numeric": numeric, "math_verify": math_verify}


def check_answer(reward: str, answer: Any) -> None:
    """Raise ValueError when the built-in reward of this name could never pay for an answer. Users' own may take anything."""
    is_text = isinstance(answer, str) and _plain(answer) != ""
    if reward in REWARDS and number_in(answer) is None and (reward == "numeric" or not is_text):
        needed = "wholly one number" if reward == "numeric" else "a text or a number"
        raise ValueError(f"its answer {reprlib.repr(answer)} is not {needed}, as task.reward = '{reward}' needs")


class Reward:
    """A function that task.reward names. Its parameters decide how it is called, and which columns of the data it takes."""

    def __init__(self, name: str, function: Callable[..., Any]):
        """Raises TypeError or ValueError when the function cannot be called."""
        self._name, self._function, self._signature = name, function, inspect.signature(function)
        names = self._signature.parameters
        self._at_once = "completions" in names  # called once, with lists, as TRL does
        self._places: tuple[Any, ...] = () if self._at_once or "solution_str" in names else ([], "", "")
        self._names = names.keys() - self._signature.bind_partial(*self._places).arguments.keys()
        self._takes_all = not self._places and any(one.kind is one.VAR_KEYWORD for one in names.values())

    def columns_taken(self, columns: list[str]) -> list[str]:
        """Return those of the data's columns that the function takes. Raises ValueError naming task.reward if it needs others."""
        keywords = self._keywords(Prompt("", [], "", dict.fromkeys(columns)), "")
        try:
            self._signature.bind(*self._places, **keywords)
        except TypeError as error:
            raise ValueError(f"task.reward: {self._name}: {error}; the columns are {', '.join(columns)}") from None
        return [column for column in columns if column in keywords and column != "prompt"]

    def _keywords(self, prompt: Prompt, response: str) -> dict[str, Any]:
        known = prompt.columns
        if self._at_once:
            completion = [{"role": "assistant", "content": response}]
            known = {"answer": prompt.answer} | known | {"prompts": prompt.messages, "completions": completion}
        elif not self._places:
            absent = {"data_source": None, "extra_info": None, "ground_truth": prompt.answer}
            known = absent | known | {"solution_str": response}
        return {name: value for name, value in known.items() if self._takes_all or name in self._names}

    def __call__(self, prompt: Prompt, responses: list[str]) -> list[float | None]:
        """Return a finite number for each response, or None where TRL's form allows it. Raises what reward_failure returns."""
        if len(responses) > 1 and not self._at_once:
            return [self(prompt, [response])[0] for response in responses]
        try:
            rows = [self._keywords(prompt, response) for response in responses]
            keywords = {name: [row[name] for row in rows] for name in rows[0]} if self._at_once else rows[0]
            value = self._function(*(prompt.messages, responses[0], prompt.answer)[: len(self._places)], **keywords)
            with suppress(TypeError, ValueError, KeyError):
                values = value if self._at_once else [value["score"] if isinstance(value, dict) else value]
                numbers = [None if one is None and self._at_once else float(one) for one in values]
                if len(numbers) == len(responses) and all(one is None or math.isfinite(one) for one in numbers):
                    return numbers
            raise ValueError(f"task.reward: {self._name} must return a finite number per response, got {value!r:.400}")
        except (Exception, SystemExit) as error:
            raise reward_failure(error, prompt, responses) from error


def load_reward(name: str) -> Reward:
    """Return the reward called name in task.reward: a key of REWARDS, or package.module:function of a user.

    The module may lie in the working folder. Raises ValueError naming task.reward when the function cannot be imported or called.
    """
    # For a console script, sys.path starts with the script's own folder, not with the working folder.
    if name not in REWARDS and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = REWARDS.get(name) or pkgutil.resolve_name(name)
        reward = Reward(name, function)
    except (Exception, SystemExit) as error:  # the user's module runs here
        raise ValueError(
            f"task.reward: {name} is neither {', '.join(REWARDS)} nor a function (prompt, response, answer), or one of TRL's or "
            f"verl's, that can be imported as package.module:function ({type(error).__name__}: {error}){_users_frames(error)}"
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"task.reward: {name} is async; it must return the number itself")
    return reward


def columns_taken(names: Iterable[str], columns: list[str]) -> list[str]:
    """Return those of the data's columns that rewards take; one that cannot be loaded takes none. Raises ValueError as each does."""
    rewards = list[Reward]()
    for name in names:
        with suppress(ValueError):
            rewards.append(load_reward(name))
    return [column for reward in rewards for column in reward.columns_taken(columns)]


def reward_failure(error: BaseException, prompt: Prompt, responses: list[str]) -> TaskFailed:
    """Return what a user needs to mend a reward function that has raised: their own lines, the prompt and the first response."""
    return TaskFailed(
        f"task.reward raised {type(error).__name__}: {error}{_users_frames(error)}\n"
        f"  prompt {prompt.id}: {shortened.repr(prompt.messages[-1]['content'])}\n"
        f"  response: {shortened.repr(responses[0])}" + f" and {len(responses) - 1} more" * (len(responses) > 1)
    )


def _users_frames(error: BaseException) -> str:
    """The frames of a traceback as Python prints them, without ours and those of the import."""
    walk = traceback.walk_tb(error.__traceback__)
    names = ((frame.f_globals.get("__name__", ""), (frame, line)) for frame, line in walk)
    frames = [place for name, place in names if name.partition(".")[0] not in NOT_THE_USERS]
    return "".join(["\n", *traceback.StackSummary.extract(frames).format()]).rstrip()
