"""What vLLM's scheduler does for a SpeculationController: a class to put in front of it. Imports no vLLM.

Of vLLM 0.32's synchronous scheduler it uses dynamic_sd_lookup (draft length by number of scheduled requests, looked up
in `schedule` once the batch is known), SchedulerOutput and ModelRunnerOutput.
"""

import time
from typing import Any

from cotrain.rollout.speculation.controller import SpeculationController, Step


class PlannedSteps:
    """Mixin before vLLM's Scheduler: a controller chooses its draft lengths and sees every step."""

    controller: SpeculationController

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.dynamic_sd_lookup = self.controller.draft_lengths(time.perf_counter())
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before vLLM's own, which may change both arguments.
        self.controller.observe(_step_of(scheduler_output, model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if not self.has_unfinished_requests():  # type: ignore[attr-defined]
            self.controller.idle(time.perf_counter())
        return outputs


def computes_prompts(output: Any) -> bool:
    """Does a step compute more of a request than its last token and the drafts behind it?

    That is the case for prompts, in chunks or whole, and for what is computed again after a preemption or an update of
    the policy.
    """
    drafts = output.scheduled_spec_decode_tokens
    more = any(num - len(drafts.get(request, ())) > 1 for request, num in output.num_scheduled_tokens.items())
    # The one token of a prompt that is not in the cache looks like decoding.
    return more or bool(output.scheduled_new_reqs)


def _step_of(output: Any, sampled: Any) -> Step:
    token_ids = sampled.sampled_token_ids  # empty when nothing was sampled
    generated = {request: len(token_ids[i]) if token_ids else 0 for request, i in sampled.req_id_to_index.items()}
    drafted = output.scheduled_spec_decode_tokens.items()
    return Step(
        num_speculative_tokens=output.num_spec_tokens_to_schedule,
        batch=len(output.num_scheduled_tokens),
        computes_prompts=computes_prompts(output),
        drafts=[(len(draft), generated[request] - 1) for request, draft in drafted if generated.get(request)],
        num_tokens=sum(generated.values()),
    )
