"""Environments that were written for the environment_factory of TRL's GRPOTrainer.

Such a class takes no argument. `reset` gets a row's columns and may return text that is put after the prompt; public methods are tools,
described by type hints and docstring; `get_reward` returns the reward (TRL 1.16: trainer/grpo_trainer.py).
"""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from cotrain.tasks.prompts import Messages, read_messages

OWN = ("reset", "get_reward")
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def is_for_trl(factory: Any) -> bool:
    """Whether this is a class for TRL and no environment of cotrain."""
    return inspect.isclass(factory) and hasattr(factory, "reset") and not hasattr(factory, "step")


class TrlEnvironment:
    """One of them as an environment of cotrain. A turn calls tools with the JSON in <tool_call> tags that Hermes and Qwen write."""

    def __init__(self, factory: Callable[[], Any], row: dict[str, Any]):
        """row: its column `prompt` is a text or a list of messages. Raises ValueError if there is none, or the class has no reward."""
        self._environment = factory()
        if not hasattr(self._environment, "get_reward"):
            raise ValueError(
                f"{type(self._environment).__name__} has no method get_reward, from which cotrain takes the reward"
            )
        if "prompt" not in row:
            raise ValueError(f"a row for TRL needs a column prompt, and has {', '.join(row)}")
        self._messages, observed = read_messages(row["prompt"]), self._environment.reset(**row)
        if observed is not None:
            self._messages[-1] = self._messages[-1] | {"content": self._messages[-1]["content"] + str(observed)}
        methods = inspect.getmembers(type(self._environment), inspect.isfunction)
        names = [name for name, _ in methods if not name.startswith("_") and name not in OWN]
        self._tools = {name: getattr(self._environment, name) for name in names}

    def messages(self) -> Messages:
        """Return the prompt, with what `reset` returned after its last message."""
        return self._messages

    def tools(self) -> list[dict[str, Any]]:
        """Return the JSON schema of each tool, for the chat template."""
        from transformers.utils import get_json_schema

        return [get_json_schema(tool) for tool in self._tools.values()]

    def step(self, text: str) -> str | None:
        """Call the tools that a turn names, one after the other. A turn without a call ends the trajectory."""
        answers = [self._answer(call) for call in CALL.findall(text)]
        return "\n".join(answers) if answers else None

    def reward(self) -> float:
        """Return what get_reward does."""
        return float(self._environment.get_reward())

    def _answer(self, call: str) -> str:
        """Return what a tool answers. An error is an answer, which the policy reads."""
        try:
            said = json.loads(call)
            return str(self._tools[said["name"]](**said.get("arguments", {})))
        except Exception as error:
            known = ", ".join(self._tools)
            return json.dumps({"error": f"{type(error).__name__}: {error}; the tools are {known}"})
