"""The task that a configuration asks for."""

from cotrain.config.schema import DatasetTask, ReasoningGymTask
from cotrain.tasks.datasets import DatasetProblems
from cotrain.tasks.reasoning import ReasoningGymProblems

Task = ReasoningGymProblems | DatasetProblems
"""A fixed list of prompts, which are the same at every call and in every process, and a score of responses to them."""


def build_task(config: ReasoningGymTask | DatasetTask, seed: int) -> Task:
    """Build the task of the [task] table.

    Raises ValueError naming the field when the task, file, column or reward is not there.
    """
    return ReasoningGymProblems(config, seed) if isinstance(config, ReasoningGymTask) else DatasetProblems(config)
