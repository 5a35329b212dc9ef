"""The scheduler's side of the speculation controller: draft lengths of the next step, trials included, and the log.

Runs in the engine core between two engine steps, on what the table in shared memory says. Trials are paid from an
account that earns the table's share of decoding time, so that their share of the time holds whatever the steps cost.
`planned_scheduling.py` connects it with vLLM's scheduler.
"""

from collections.abc import Sequence
from typing import Any

from cotrain.rollout.speculation.draft_length_table import NO_TRIAL, DraftLengthTable, StepLog

MOST_SAVED = 2.0
"""Trials that the account can hold."""


class StepPlanner:
    """One engine's steps. Times are seconds of one clock, passed in."""

    def __init__(self, table: DraftLengthTable, log: StepLog, max_batch: int, max_draft_tokens: int):
        """max_batch: vLLM's max_num_seqs; above the table's batch sizes its last entry goes on."""
        self._table, self._log = table, log
        self._max_batch, self._max_draft_tokens = max_batch, max_draft_tokens
        self._lengths = table.read()
        self._normal, self._trial = self._lookups()
        self._account = 0.0
        self._trials_at_once = self._lengths.trials_at_once
        self._trial_steps_left = 0
        self._trial_lengths = self._trial
        self._batch = 1
        self._started: float | None = None
        self._in_trial = self._after_trial = False
        self._step: dict[str, Any] | None = None

    def draft_lengths(self, now: float) -> list[int]:
        """Draft length by batch size, [max_batch + 1], of the step that begins now; ends the one before."""
        self._end_step(now)
        lengths = self._table.read()
        if lengths is not self._lengths:
            self._lengths = lengths
            self._normal, self._trial = self._lookups()
        self._after_trial = self._in_trial
        if self._trial_steps_left == 0 and self._trial_is_due():
            self._trial_steps_left = lengths.trial_steps
            self._trial_lengths = self._trial  # to its end, whatever is wanted next by then
        self._in_trial = self._trial_steps_left > 0
        self._trial_steps_left -= self._in_trial
        self._started = now
        return self._trial_lengths if self._in_trial else self._normal

    def scheduled(self, batch: int, draft_tokens: int, verified: Sequence[int], prefill: bool) -> None:
        """What vLLM made of it. verified: draft tokens of each request that this step verifies, [batch]."""
        if batch == 0:
            self._step = self._started = None
            return
        self._batch = batch
        self._step = {
            "batch": batch,
            "draft_tokens": draft_tokens,
            "steady": not prefill and all(n == draft_tokens for n in verified),
            "prefill": prefill,
            "trials": [0] * self._max_draft_tokens,
            "accepted": [0] * self._max_draft_tokens,
            "tokens": 0,
        }

    def verified(self, drafts: Sequence[tuple[int, int]], tokens: int) -> None:
        """Result of the step: (draft tokens, accepted ones) of each request with drafts, and all tokens generated."""
        if self._step is None:
            return
        self._step["tokens"] = tokens
        for drafted, accepted in drafts:
            for i in range(min(drafted, accepted + 1)):
                self._step["trials"][i] += 1
                self._step["accepted"][i] += i < accepted

    def idle(self, now: float) -> None:
        """The last request has finished; the step ends here, and a trial with it."""
        self._end_step(now)
        self._trial_steps_left = 0

    def _end_step(self, now: float) -> None:
        step, started = self._step, self._started
        self._step = self._started = None
        if step is None or started is None:
            return
        seconds = now - started
        if not step["prefill"]:
            if self._has_trial(step["batch"]):
                most = MOST_SAVED * self._lengths.trial_seconds[self._entry(step["batch"])]
                earned = self._account + self._lengths.trial_share * seconds
                self._account = min(earned, max(most, self._account))
            if self._in_trial or self._after_trial:  # the step after a trial still verifies what it has drafted
                self._account -= seconds
        counts = (tuple(step["trials"]), tuple(step["accepted"]))
        kind = (step["steady"], self._in_trial or self._after_trial, step["prefill"])
        self._log.append((step["batch"], step["draft_tokens"], *kind, seconds, step["tokens"], *counts))

    def _trial_is_due(self) -> bool:
        if not self._has_trial(self._batch):
            return False
        entry = self._entry(self._batch)
        cost = self._lengths.trial_seconds[entry]
        wanted_at_once = self._lengths.trials_at_once != self._trials_at_once
        # One trial may be paid later; where speculation is on, there is nothing to find out by a trial.
        if wanted_at_once and self._lengths.draft_tokens[entry] == 0 and self._account >= 0:
            self._trials_at_once = self._lengths.trials_at_once
            return True
        return self._account >= cost

    def _has_trial(self, batch: int) -> bool:
        return self._lengths.trial_share > 0 and self._lengths.trial_tokens[self._entry(batch)] != NO_TRIAL

    def _entry(self, batch: int) -> int:
        return min(batch, len(self._lengths.draft_tokens) - 1)

    def _lookups(self) -> tuple[list[int], list[int]]:
        entries = [self._entry(batch) for batch in range(self._max_batch + 1)]
        bound, lengths = self._max_draft_tokens, self._lengths
        normal = [min(lengths.draft_tokens[e], bound) for e in entries]
        trial = [
            normal[b] if lengths.trial_tokens[e] == NO_TRIAL else min(lengths.trial_tokens[e], bound)
            for b, e in enumerate(entries)
        ]
        return normal, trial
