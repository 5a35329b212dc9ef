"""What vLLM's scheduler has to do for a StepPlanner: a class to put in front of it. Imports no vLLM.

Of vLLM 0.32's synchronous scheduler it uses dynamic_sd_lookup (draft length by number of scheduled requests, looked up
in `schedule` once the batch is known), SchedulerOutput and ModelRunnerOutput.
"""

import time
from typing import Any

from cotrain.rollout.speculation.step_planner import StepPlanner


class PlannedSteps:
    """Mixin before vLLM's Scheduler: its draft lengths are the planner's, which sees every step. None plans nothing."""

    planner: StepPlanner | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.planner is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.dynamic_sd_lookup = self.planner.draft_lengths(time.perf_counter())
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        report_schedule(self.planner, output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.planner is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        report_verification(self.planner, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if not self.has_unfinished_requests():  # type: ignore[attr-defined]
            self.planner.idle(time.perf_counter())
        return outputs


def computes_prompts(output: Any) -> bool:
    """Does a step compute more of a request than its last token and the drafts behind it?

    Prompts, in chunks or whole, and what is computed again after a preemption or an update of the policy.
    """
    drafts = output.scheduled_spec_decode_tokens
    more = any(num - len(drafts.get(request, ())) > 1 for request, num in output.num_scheduled_tokens.items())
    # The one token of a prompt that is not in the cache looks like decoding.
    return more or bool(output.scheduled_new_reqs)


def report_schedule(planner: StepPlanner, output: Any) -> None:
    """Tell the planner what Scheduler.schedule returned."""
    drafts = output.scheduled_spec_decode_tokens
    verified = [len(drafts.get(request, ())) for request in output.num_scheduled_tokens]
    planner.scheduled(len(verified), output.num_spec_tokens_to_schedule, verified, computes_prompts(output))


def report_verification(planner: StepPlanner, output: Any, sampled: Any) -> None:
    """Tell the planner what the step generated. Before update_from_output, which may change both arguments."""
    token_ids = sampled.sampled_token_ids  # empty when nothing was sampled
    generated = {request: len(token_ids[i]) if token_ids else 0 for request, i in sampled.req_id_to_index.items()}
    drafts = [
        (len(draft), generated[request] - 1)
        for request, draft in output.scheduled_spec_decode_tokens.items()
        if generated.get(request)
    ]
    planner.verified(drafts, sum(generated.values()))
