"""The protocol of a task, and the one place that builds the task a configuration asks for."""

from typing import Protocol

from cotrain.config.schema import DatasetTask, ReasoningGymTask
from cotrain.records import Prompt
from cotrain.tasks.datasets import DatasetProblems
from cotrain.tasks.reasoning import ReasoningGymProblems


class Task(Protocol):
    """A fixed list of prompts and a way to score responses to them."""

    def __len__(self) -> int:
        """Count the prompts."""

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of index 0 <= index < len(self); the same one at every call and in every process."""

    def score(self, prompt: Prompt, response: str) -> float:
        """Return the reward of a response to prompt, a finite number."""


def build_task(config: ReasoningGymTask | DatasetTask, seed: int) -> Task:
    """Build the task of the [task] table.

    Raises ValueError naming the field when the task, file, column or reward is not there.
    """
    return ReasoningGymProblems(config, seed) if isinstance(config, ReasoningGymTask) else DatasetProblems(config)
