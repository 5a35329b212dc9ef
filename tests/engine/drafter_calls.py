"""A vLLM worker that counts the drafter's forward passes."""

import functools
from typing import Any

from cotrain.engine.interface import computes_prompts
from cotrain.engine.worker import EngineWorker
from cotrain.engine.worker_extension import CotrainWorker


class Counting(EngineWorker):
    """For each engine step: does it compute prompts, and how often did the drafter run?"""

    def start(self, *args: Any) -> None:
        super().start(*args)
        runner = self.worker.model_runner
        execute = runner.execute_model
        self._steps: list[list[int]] = [[0, 0]]

        def execute_model(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
            self._steps.append([int(computes_prompts(scheduler_output)), 0])
            return execute(scheduler_output, *rest, **options)

        def count(*call: Any) -> None:
            self._steps[-1][1] += 1

        runner.execute_model = execute_model
        runner.drafter.model.register_forward_pre_hook(count)

    def take_steps(self) -> list[list[int]]:
        """The steps since the last call."""
        steps, self._steps = self._steps[1:], [[0, 0]]
        return steps


class CountingWorker(CotrainWorker):
    cotrain_worker = functools.cached_property(Counting)
