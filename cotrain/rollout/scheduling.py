"""Draft length at run time: a vLLM scheduler that reads it from a byte of shared memory before every step."""

import mmap
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from cotrain.orphans import die_with_parent, leave_terminal_group

CONFIG_KEY = "cotrain_draft_length_file"


class DraftLength:
    """One byte in a file: the number of draft tokens of the next step. Written by the engine's owner."""

    def __init__(self, path: str | Path, initial: int | None = None):
        """Map the file; `initial` creates it."""
        if initial is not None:
            Path(path).write_bytes(bytes([initial]))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 1)

    def get(self) -> int:
        """Draft tokens of the next step."""
        return self._map[0]

    def set(self, draft_tokens: int) -> None:
        """Takes effect in the next step. 0 switches speculation off."""
        self._map[0] = draft_tokens


class DraftLengthScheduler(Scheduler):
    """vLLM's scheduler, with the number of draft tokens taken from `DraftLength` (at most the configured number)."""

    def __init__(self, *args: Any, **kwargs: Any):
        # The scheduler lives in the engine core, a process of its own.
        die_with_parent()
        leave_terminal_group()
        super().__init__(*args, **kwargs)
        path = self.vllm_config.additional_config[CONFIG_KEY]
        self._draft_length = DraftLength(path) if self.num_spec_tokens else None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._draft_length is not None:
            draft_tokens = min(self._draft_length.get(), self.num_spec_tokens)
            # vLLM's table of draft length by batch size, made constant for this step
            self.dynamic_sd_lookup = [draft_tokens] * (self.scheduler_config.max_num_seqs + 1)
        return super().schedule(*args, **kwargs)
