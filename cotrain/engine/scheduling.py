"""vLLM's schedulers with draft lengths that are chosen for each step, and a way to reach `DraftLengths` from outside."""

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from cotrain.engine.interface import computes_prompts
from cotrain.engine.speculation.draft_length import DraftLengths, Step
from cotrain.process.children import follow_parent
from drafters.config import BLOCK_DRAFTERS


def draft_lengths_of(scheduler: Any) -> DraftLengths:
    """Return the choice of draft lengths for one of vLLM's schedulers."""
    speculation, by_length = scheduler.vllm_config.speculative_config, False
    if speculation is not None and speculation.method in BLOCK_DRAFTERS:
        config = speculation.draft_model_config.hf_config
        causal = getattr(config, "is_causal", None)
        by_length = not ((getattr(config, "dflash_config", None) or {}).get("causal") if causal is None else causal)
    return DraftLengths(scheduler.num_spec_tokens, scheduler.scheduler_config.max_num_seqs, by_length)


class WatchedScheduler:
    """Mixed into a scheduler of vLLM to act around each of its steps. Subclasses may override the methods with `cotrain_`.

    DraftLengths sees each step and chooses draft lengths up to the configured one. vLLM looks the draft length up in
    dynamic_sd_lookup, by the number of requests that `schedule` has scheduled.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cotrain_start()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.cotrain_choose_lengths()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        output.cotrain = self.cotrain_stamp(output)  # it goes to the workers with the step
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # This comes before vLLM's own method, which may change both arguments.
        self.cotrain_observe(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if not self.has_unfinished_requests():  # type: ignore[attr-defined]
            self.cotrain_pause()
        return outputs

    def set_pause_state(self, pause_state: Any) -> None:
        self.cotrain_pause()  # the time of a pause does not belong to the step before it
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def cotrain_start(self) -> None:
        self.draft_lengths = draft_lengths_of(self)

    def cotrain_choose_lengths(self) -> None:
        self.dynamic_sd_lookup = self.draft_lengths.choose(time.perf_counter())

    def cotrain_stamp(self, output: Any) -> object:
        """Return the record that a SchedulerOutput carries: what the worker, which knows each request's match, needs."""
        return self.draft_lengths.plan(max(1, len(output.num_scheduled_tokens)))

    def cotrain_observe(self, output: Any, sampled: Any) -> None:
        """See what became of a step, from vLLM's SchedulerOutput and ModelRunnerOutput."""
        if generated := generated_of(self.requests, output, sampled):  # type: ignore[attr-defined]
            self.draft_lengths.observe(step_of(output, generated))

    def cotrain_pause(self) -> None:
        """Note that the next step does not follow at once."""
        self.draft_lengths.idle(time.perf_counter())


class DraftLengthScheduler(WatchedScheduler, Scheduler):
    """vLLM's synchronous scheduler, watched. It lives in the engine core, a process of its own."""

    def cotrain_start(self) -> None:
        follow_parent()
        super().cotrain_start()


class OverlappingScheduler(DraftLengthScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler, watched. It schedules the next step while one runs, so the time of a step is still the time
    between two calls of `schedule`, and the drafts of the step that runs stay on the device."""


def _call_draft_lengths(core: Any, method: str, args: list[Any], options: dict[str, Any]) -> Any:
    """Call a method of DraftLengths between two engine steps, for RolloutEngine.in_scheduler."""
    return getattr(core.scheduler.draft_lengths, method)(*args, **options)


# vLLM's "utility" calls look methods of the engine core up by name; it has no hook to add one.
EngineCore.cotrain_draft_lengths = _call_draft_lengths


def generated_of(requests: dict[str, Any], output: Any, sampled: Any) -> dict[str, int]:
    """Return the tokens that a step generated for each request, before vLLM's scheduler, whose `requests` these are, gets its output.

    With asynchronous scheduling, a step runs also for requests that the step before has ended, and for some that are computed
    again. vLLM drops what it generates for them, and they are left out here.
    """
    token_ids, index = sampled.sampled_token_ids, sampled.req_id_to_index
    return {
        name: len(token_ids[index[name]]) if token_ids else 0  # no token ids when nothing was sampled
        for name in output.num_scheduled_tokens
        if (request := requests.get(name)) is not None
        and not request.is_finished()
        and not (request.num_stale_output_tokens and request.drop_stale_output)
    }


def verified(output: Any, generated: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return (verified draft tokens, accepted ones) of each request that had drafts in a step and generated tokens."""
    drafted = output.scheduled_spec_decode_tokens.items()
    return {request: (len(draft), generated[request] - 1) for request, draft in drafted if generated.get(request)}


def step_of(output: Any, generated: dict[str, int]) -> Step:
    """Return what became of a step. generated: see `generated_of`; there are no other requests in it."""
    return Step(
        num_speculative_tokens=output.num_spec_tokens_to_schedule,
        batch=len(generated),
        computes_prompts=computes_prompts(output),
        drafts=list(verified(output, generated).values()),
        num_tokens=sum(generated.values()),
    )
