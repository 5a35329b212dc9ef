"""A vLLM worker that counts the drafter's forward passes."""

from typing import Any

from cotrain.rollout.vllm.scheduling import computes_prompts
from cotrain.rollout.vllm.worker_extension import CotrainWorker


class CountingWorker(CotrainWorker):
    """For each engine step: does it compute prompts, and how often did the drafter run?"""

    def cotrain_start(self, *args: Any) -> None:
        super().cotrain_start(*args)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model
        self._cotrain_steps: list[list[int]] = [[0, 0]]

        def execute_model(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
            self._cotrain_steps.append([int(computes_prompts(scheduler_output)), 0])
            return execute(scheduler_output, *rest, **options)

        def count(*call: Any) -> None:
            self._cotrain_steps[-1][1] += 1

        runner.execute_model = execute_model
        runner.drafter.model.register_forward_pre_hook(count)

    def cotrain_take_steps(self) -> list[list[int]]:
        """The steps since the last call."""
        steps, self._cotrain_steps = self._cotrain_steps[1:], [[0, 0]]
        return steps
