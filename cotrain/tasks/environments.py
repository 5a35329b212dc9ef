"""Environments: tasks of several turns, whose tools answer what the policy says (docs/guide/environments.md)."""

import os
import pkgutil
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cotrain.config.schema import EnvironmentTask
from cotrain.records import Prompt
from cotrain.tasks.prompts import Messages, encode_prompt, read_messages
from cotrain.tasks.trl_environments import TrlEnvironment, is_for_trl

NUM_CHECKED = 8
"""Environments that are made before a run starts, to check their first messages."""


class Environment(Protocol):
    """What task.factory makes for each trajectory. A class needs no base. It may have a method tools() as well, which returns the JSON
    schemas that the chat template writes into the prompt, and a method close(), which is called once the trajectory has ended or failed."""

    def messages(self) -> Messages:
        """Return the chat messages that the trajectory begins with, which are the same for all samples of a row."""

    def step(self, text: str) -> str | None:
        """Answer what the policy said in a turn; None ends the trajectory. An exception fails it."""

    def reward(self) -> float:
        """Return the reward of the whole trajectory."""


def load_factory(config: EnvironmentTask) -> Callable[..., Environment]:
    """Return what makes the environments of a task. Raises ValueError naming the field."""
    if os.getcwd() not in sys.path:  # that of a console script begins with the script's own folder
        sys.path.append(os.getcwd())
    if config.verifiers:
        try:
            from cotrain.tasks.verifiers_environments import VerifiersEnvironments

            return VerifiersEnvironments(config.verifiers, config.size)
        except ModuleNotFoundError as error:
            raise ValueError(f"task.verifiers: {error}; pip install 'cotrain[verifiers]'") from error
        except Exception as error:  # verifiers and the task set run here
            raise ValueError(f"task.verifiers: {type(error).__name__}: {error}") from error
    name = str(config.factory)
    try:
        factory = pkgutil.resolve_name(name)
    except Exception as error:  # the user's module runs here
        what = f"{name} cannot be imported as package.module:Class ({type(error).__name__}: {error})"
        raise ValueError(f"task.factory: {what}") from error
    if not callable(factory):
        raise ValueError(f"task.factory: {name} is no class and no function")
    return (lambda **row: TrlEnvironment(factory, row)) if is_for_trl(factory) else factory


class EnvironmentPrompts:
    """The first messages of the environment of each row. Its row is the prompt's answer.

    An environment is made for them here too, in the run's own process, which asks it for nothing else.
    """

    def __init__(self, config: EnvironmentTask, seed: int, tokenizer: Any = None, max_prompt_tokens: int = 0) -> None:
        """tokenizer: also check the first environments and the chat template. Raises ValueError naming the field."""
        self._config, self._seed, self._factory, self._rows = config, seed, load_factory(config), None
        if config.path is not None:
            from cotrain.tasks.datasets import load_rows

            self._rows = load_rows(config.path, config.split)
        else:
            self._rows = getattr(self._factory, "rows", None)
        if tokenizer is not None:
            TurnTemplate(tokenizer)
            for index in range(min(NUM_CHECKED, len(self))):
                encode_prompt(tokenizer, self[index], max_prompt_tokens)

    def __len__(self) -> int:
        return self._config.size if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = (
            {"seed": random.Random(f"{self._seed}/{index}").getrandbits(31)}
            if self._rows is None
            else self._rows[index]
        )
        try:
            environment = self._factory(**row)
            messages = read_messages(environment.messages())
            tools = environment.tools() if hasattr(environment, "tools") else []
        except Exception as error:
            field = "verifiers" if self._config.verifiers else "factory"
            what = f"{self._config.factory or 'the task'} with row {index}: {type(error).__name__}: {error}"
            raise ValueError(f"task.{field}: {what}") from error
        return Prompt(f"{Path(self._config.factory or 'verifiers').name}-{index}", messages, row, tools=tools)


class TurnTemplate:
    """The pieces of a chat template between two turns, found once, so that nothing that was sampled is encoded again."""

    def __init__(self, tokenizer: Any):
        """Raises ValueError naming policy.model if the template rewrites earlier turns, to which then nothing can be appended."""
        self._tokenizer = tokenizer
        first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}]
        for role in ("tool", "user"):
            try:
                texts = [tokenizer.apply_chat_template(first, tokenize=False, add_generation_prompt=False)]
                then = [*first, {"role": role, "content": "\x00"}]
                texts.append(tokenizer.apply_chat_template(then, tokenize=False, add_generation_prompt=True))
            except Exception:  # a template is a program, which may refuse a role
                continue
            before, after = texts
            thought = "<think>\nb\n</think>\n\nc"
            end = before.rfind(thought) + len(thought)  # the policy samples what closes its turn
            closing = before[end:].partition(str(tokenizer.eos_token))
            if thought in before and after.startswith(before) and closing[1] and after.count("\x00") == 1:
                self._opening, self._closing = (closing[2] + after[len(before) :]).split("\x00")
                return
        raise ValueError(
            "policy.model: its chat template rewrites or drops what was said in earlier turns, so that a turn cannot be appended to "
            "them; take a policy whose template leaves them alone, or put such a template into its folder as chat_template.jinja"
        )

    def observation(self, text: str, last_token: int) -> list[int]:
        """Return the token ids of what an environment answered, up to where the policy goes on.

        last_token: of the turn that it answers. One that ended otherwise than with a special token, at a stop string, is closed first.
        """
        closing = "" if last_token in self._tokenizer.all_special_ids else self._tokenizer.eos_token
        return list(
            self._tokenizer(closing + self._opening + text + self._closing, add_special_tokens=False)["input_ids"]
        )
