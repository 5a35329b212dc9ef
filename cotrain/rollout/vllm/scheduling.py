"""Draft length at run time: a vLLM scheduler that follows the table of the engine's speculation controller.

Its counterpart is `speculation.py`, in the process that owns the engine; the two share memory (draft_length_table.py).
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from cotrain.process.orphans import die_with_parent, leave_terminal_group
from cotrain.rollout.speculation.draft_length_table import DraftLengthTable, StepLog
from cotrain.rollout.speculation.step_planner import StepPlanner
from cotrain.rollout.vllm.planned_scheduling import PlannedSteps

TABLE_KEY, LOG_KEY = "cotrain_draft_lengths", "cotrain_engine_steps"
"""Keys of vLLM's additional_config: paths of the shared files."""


class DraftLengthScheduler(PlannedSteps, Scheduler):
    """vLLM's synchronous scheduler, with a draft length for each step; never more than the configured number."""

    def __init__(self, *args: Any, **kwargs: Any):
        # The scheduler lives in the engine core, a process of its own.
        die_with_parent()
        leave_terminal_group()
        super().__init__(*args, **kwargs)
        if self.num_spec_tokens:
            files, num_tokens = self.vllm_config.additional_config, self.num_spec_tokens
            table, log = DraftLengthTable(files[TABLE_KEY]), StepLog(files[LOG_KEY], num_tokens)
            self.planner = StepPlanner(table, log, self.scheduler_config.max_num_seqs, num_tokens)
