"""vLLM's scheduler with a draft length for each step, and how the engine's owner reaches its speculation controller."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from cotrain.process.children import follow_parent
from cotrain.rollout.speculation.controller import SpeculationController
from cotrain.rollout.vllm.planned_scheduling import PlannedSteps


class DraftLengthScheduler(PlannedSteps, Scheduler):
    """vLLM's synchronous scheduler, with a draft length for each step; never more than the configured number."""

    def __init__(self, *args: Any, **kwargs: Any):
        # The scheduler lives in the engine core, a process of its own.
        follow_parent()
        super().__init__(*args, **kwargs)
        self.controller = SpeculationController(self.num_spec_tokens, self.scheduler_config.max_num_seqs)


def _call_controller(core: Any, method: str, args: list[Any]) -> Any:
    """Between two engine steps. Results are plain lists and numbers, all that vLLM sends from one process to another."""
    return getattr(core.scheduler.controller, method)(*args)


# vLLM's "utility" calls look methods of the engine core up by name; it has no hook to add one.
EngineCore.cotrain_speculation = _call_controller


async def call_controller(engine: Any, method: str, *args: Any) -> Any:
    """Call a method of the speculation controller of an AsyncLLM that speculates."""
    return await engine.engine_core.call_utility_async("cotrain_speculation", method, list(args))
