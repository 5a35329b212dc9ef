"""Chooses the draft length of each engine step, 0 included: the one with the most expected tokens per second.

The controller lives in vLLM's scheduler, which sees the batch size and the clock of every step (`vllm/scheduling.py`).
It decides from batch size, step times and acceptance so far, before any token of the next draft is drawn. So it does not
change the distribution of the emitted tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from cotrain.records import GainReport
from cotrain.rollout.speculation.measurement import MEASURE_TRIES, contradicts, measured_length, measured_sizes
from cotrain.rollout.speculation.served_acceptance import ServedAcceptance
from cotrain.rollout.speculation.step_costs import QUANTILE, Array, StepCosts, Trials

DECIDE_STEPS = 16
"""Engine steps from one choice to the next; a choice takes about 0.1 ms."""

LIVE_STEPS = 12
"""Timed steps of each draft length that a batch size needs before a choice rests on them, where live requests are timed: three
turns of measurement.MEASURE_STEPS, with 4 timed steps each."""


class Step(NamedTuple):
    """One engine step, as the scheduler saw it."""

    num_speculative_tokens: int
    """Tokens drafted for each request at the end of the step."""
    batch: int
    computes_prompts: bool
    drafts: Sequence[tuple[int, int]]
    """(verified draft tokens, accepted ones) of each request that had drafts."""
    num_tokens: int
    """Number of tokens that the step generated."""
    has_passes: bool = True
    """Whether the drafter ran at the end of the step."""

    @property
    def steady(self) -> bool:
        """Whether every request verified as many tokens as this step drafts. Only then is its time that of a draft length."""
        drafting = self.batch if self.num_speculative_tokens else 0
        alike = all(verified == self.num_speculative_tokens for verified, _ in self.drafts)
        return alike and len(self.drafts) == drafting and not self.computes_prompts


class SpeculationController:
    """Chooses a draft length from 0 to K for each batch size. It stays at K until engine steps have been measured."""

    def __init__(self, max_speculative_tokens: int, max_batch: int, drafts_are_free: bool = False):
        """drafts_are_free: drafts are looked up and not computed, so a step's time depends only on what it verifies."""
        self.max_speculative_tokens, self.max_batch = max_speculative_tokens, max_batch
        self._per_request = False
        self._acceptance, self._trials = ServedAcceptance(max_speculative_tokens), Trials()
        self._costs: StepCosts | None = None
        # Seconds by (draft length, batch size), while measuring.
        self._measured: dict[tuple[int, int], list[float]] = {}
        self.measured_kind = ""
        """The kind that is being measured, see begin_measuring; empty while nothing is."""
        self._live = False  # are live requests of a host measured, in batches of any size?
        self._fixed: int | None = max_speculative_tokens
        self._chosen = np.zeros(max_batch, np.int64)
        self._num_steps = 0
        self._drafts_are_free = drafts_are_free
        self._step: Step | None = None
        self._before: Step | None = None  # the step before that one, if its requests go on
        self._started = 0.0
        self.begin()

    # -- what the engine's owner calls, between two steps ------------------------------------------------------------

    def begin(self, learns: bool = True) -> None:
        """Start a report. learns: False if its steps sample in another way, so that the controller must not learn from them."""
        self._learns = learns
        self._gain, self._without = GainReport(), np.zeros(self.max_batch)
        self._totals: dict[tuple[int, int, str], list[float]] = {}  # number, tokens and seconds of engine steps

    def report(self) -> dict[str, Any]:
        """Return the report and start the next. gain: fields of a GainReport. steps: the fields of each StepTotal."""
        gain = replace(self._gain, seconds_without=float(self._without.sum()))
        if self._costs is not None:
            seconds_at = self._without * self._costs.ratios()
            gain = replace(gain, seconds_at=seconds_at.T[self._without > 0].tolist())
        steps = [[*key, *total] for key, total in self._totals.items()]
        self.begin(self._learns)
        return {"gain": asdict(gain), "steps": steps}

    def fix_num_speculative_tokens(self, num_speculative_tokens: int | None) -> bool:
        """Use this length at every batch size; None lets the controller choose. Returns whether it chooses from now on.

        None means the longest while nothing has been measured. The controller learns nothing from steps of a fixed length.
        """
        if num_speculative_tokens is None and self._costs is None:
            num_speculative_tokens = self.max_speculative_tokens
        self._fixed = num_speculative_tokens
        return self._fixed is None

    def choose_per_request(self, on: bool) -> None:
        """Let the worker choose the draft length of each request by `prices`, up to the length of the batch."""
        self._per_request = on
        self._decide()

    def begin_measuring(self, kind: str = "all", live: bool = False) -> None:
        """Time the engine steps that follow, at all draft lengths.

        kind: "all" comes first. In steps of "verification" the drafter does not run, as when all drafts come from history.
        In steps of "one" a single request drafts one token. live: time batches of any size, until `has_measured`, instead of
        only those of `measured_sizes`.
        """
        self._measured, self._num_steps, self.measured_kind, self._live = {}, 0, kind, live

    @property
    def has_measured(self) -> bool:
        """Whether LIVE_STEPS engine steps of each draft length were timed at some batch size since `begin_measuring`, or twice as
        many if they contradict each other."""
        lengths, known = range(self.max_speculative_tokens + 1), self._measured
        fewest = max((min(len(known.get((k, b), ())) for k in lengths) for k0, b in known if not k0), default=0)
        return fewest >= MEASURE_TRIES * LIVE_STEPS or (fewest >= LIVE_STEPS and not self.contradicts())

    def contradicts(self) -> bool:
        """Whether the steps timed so far contradict each other, see measurement.contradicts."""
        return contradicts(self._measured)

    def end_measuring(self) -> list[list[float]]:
        """Choose from now on by the steps since `begin_measuring`, which no report counts. Returns rows of [draft length, batch
        size, seconds, their relative standard error, steps], or none after too few steps; the choice then stays as it was."""
        measured, self._measured = self._measured, {}
        kind, longest, self.measured_kind = self.measured_kind, self._longest_measured, ""
        if self._live:
            measured = {cell: seconds for cell, seconds in measured.items() if len(seconds) >= LIVE_STEPS}
        self.begin(self._learns)
        try:
            costs = StepCosts(longest, self.max_batch, measured)
        except ValueError:
            return []
        if kind == "all":
            self._costs, self._fixed = costs, None
        elif self._costs is not None and kind == "verification":
            self._costs.set_verification(costs)
        elif self._costs is not None:
            self._costs.set_first_draft(costs)
        self._decide()
        rows = (
            (*cell, np.quantile(s, QUANTILE), np.log(s).std() / len(s) ** 0.5, len(s)) for cell, s in measured.items()
        )
        return [list(map(float, row)) for row in rows]

    def new_drafter(self, expected_rates: Sequence[float] | None = None) -> None:
        """Forget acceptance so far: another drafter serves. expected_rates: see ServedAcceptance; None if none are known."""
        self._acceptance = ServedAcceptance(self.max_speculative_tokens, expected_rates or ())
        self._decide()

    def describe(self) -> str:
        """Return the choice and its reason in words: k=2 at batch 1 (gain 1.21x), off at batch 2 to 16: 0.78x at k=1."""
        if self._fixed is not None:
            return f"k={self._fixed} at every batch size (fixed)"
        if self._per_request:
            return f"k=0 to {self.max_speculative_tokens}, chosen for each request"
        gains, parts = self._gains(), []
        for batches in np.split(np.arange(self.max_batch), np.flatnonzero(np.diff(self._chosen)) + 1):
            k, first, last = int(self._chosen[batches[0]]), batches[0] + 1, batches[-1] + 1
            where = f"at batch {first}" + (f" to {last}" if last > first else "")
            best = int(gains[1:, batches[0]].argmax()) + 1
            low, high = (f"{bound:.2f}x" for bound in (gains[k, batches].min(), gains[k, batches].max()))
            on = f"k={k} {where} (gain {low if low == high else f'{low} to {high}'})"
            parts.append(on if k else f"off {where}: {gains[best, batches[0]]:.2f}x at k={best}")
        return ", ".join(parts)

    # -- what the scheduler calls in every step; `now` is seconds of one clock -----------------------------------------

    def draft_lengths(self, now: float) -> list[int]:
        """Return the draft length of the step that begins now, by batch size [max_batch + 1]."""
        self._end_step(now)
        self._started = now
        length = self._trials.num_speculative_tokens if self._fixed is None else self._fixed
        if self.measured_kind:
            length = measured_length(self._num_steps, self._longest_measured)
        return [0, *map(int, self._chosen)] if length is None else [length] * (self.max_batch + 1)

    @property
    def _longest_measured(self) -> int:
        return 1 if self.measured_kind == "one" else self.max_speculative_tokens

    def prices(self, batch: int) -> tuple[list[float], list[float], float] | None:
        """Return the price of each draft length with drafts from history, the same with the drafter's, and that of a first draft.

        A price [K+1] is the number of tokens that a request of the batch would get without speculation in the time of a step of
        that length. The last value is the part of each price, except at length 0, that the batch pays as soon as any request
        drafts. Returns None if all requests have the same length: by choice, or while a length is fixed, measured or tried.
        """
        chooses = self._per_request and self._fixed is None and not self.measured_kind
        if not chooses or self._costs is None or self._trials.num_speculative_tokens is not None:
            return None
        of_history, of_drafter = (self._costs.ratios(has_passes)[:, batch - 1].tolist() for has_passes in (False, True))
        return of_history, of_drafter, self._costs.first_draft(batch)

    def observe(self, step: Step) -> None:
        """Take note of what the current step did. Its time ends when the next step begins, or with `idle`."""
        self._step = step if step.batch else None

    def left_passes_out(self) -> None:
        """Say that the drafter did not run at the end of the step that was observed last."""
        if self._step is not None:
            self._step = self._step._replace(has_passes=False)

    def idle(self, now: float) -> None:
        """End the last step, because no other follows at once: all requests have finished, or the engine pauses."""
        self._end_step(now)
        self._started = now
        if self._before is not None:
            self._end_trial(self._before.batch)
        self._before = None
        if self._costs is not None:
            self._costs.pause()

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        seconds, before, self._before = now - self._started, self._before, step
        chooses = self._fixed is None and not self.measured_kind
        of_drafter = self.measured_kind == "all" and not self._drafts_are_free
        if self._learns and (chooses or of_drafter):
            self._acceptance.observe(step.drafts)
        kind = "prompts" if step.computes_prompts else "steady" if step.steady else "mixed"
        total = self._totals.setdefault((step.num_speculative_tokens, step.batch, kind), [0, 0, 0.0])
        total[:] = total[0] + 1, total[1] + step.num_tokens, total[2] + seconds
        if step.computes_prompts:
            return
        if self.measured_kind:
            self._num_steps += 1
            one = self.measured_kind == "one" and len(step.drafts) == step.num_speculative_tokens
            if (kind == "steady" or one) and (self._live or step.batch in measured_sizes(self.max_batch)):
                self._measured.setdefault((step.num_speculative_tokens, step.batch), []).append(seconds)
        elif chooses and self._costs is not None:
            self._count(self._costs, step, before, seconds)
            if self._learns:
                self._learn(self._costs, step, before, seconds)

    def _length(self, step: Step, before: Step | None) -> float | None:
        """Return the draft length that the time of a step without prompts belongs to; None right after it has changed."""
        stays = before is not None and before.num_speculative_tokens == step.num_speculative_tokens
        if self._drafts_are_free or (self._per_request and stays):
            return sum(verified for verified, _ in step.drafts) / step.batch
        return float(step.num_speculative_tokens) if step.steady else None

    def _count(self, costs: StepCosts, step: Step, before: Step | None, seconds: float) -> None:
        without = costs.seconds(0, step.batch) * step.num_tokens / step.batch
        length = self._length(step, before)
        if length is not None:  # whatever slowed this step would have slowed one without speculation as much
            without *= seconds / costs.seconds(length, step.batch, step.has_passes)
        asked = 0 if before is None else before.num_speculative_tokens
        if self._per_request:  # the worker decides, and may draft nothing
            asked = max((number for number, _ in step.drafts), default=0)
        # A step without drafts emits a token of each request, and takes no longer than this one did: the rest is noise.
        self._without[step.batch - 1] += min(without, seconds * step.num_tokens / step.batch)
        self._gain += GainReport(
            seconds=seconds,
            trial_seconds=0.0 if self._trials.num_speculative_tokens is None else seconds,
            longest_draft=asked,
        )

    def _learn(self, costs: StepCosts, step: Step, before: Step | None, seconds: float) -> None:
        error, length = None, self._length(step, before)
        if length is not None and self._trials.num_speculative_tokens is None:
            costs.follow(length, step.batch, seconds, step.has_passes)
        elif length is not None:
            error = float(np.log(seconds / costs.seconds(length, step.batch, step.has_passes)))
        over = self._trials.observe(seconds, error)
        self._num_steps += 1
        if over:
            self._end_trial(step.batch)
        elif self._num_steps % DECIDE_STEPS == 0:
            self._decide()
        if self._trials.due and costs.knows_pace:
            entry = step.batch - 1
            self._trials.begin(int(self._chosen[entry]), self._gains()[:, entry], costs.ratios()[:, entry])

    def _end_trial(self, batch: int) -> None:
        tried = self._trials.num_speculative_tokens
        if self._costs is None or tried is None:
            return
        if (error := self._trials.end()) is not None:
            self._costs.correct(tried, batch, error)
            self._decide()

    def _gains(self) -> Array:
        """Return the expected decoding speed relative to no speculation, [K+1, max_batch]."""
        assert self._costs is not None
        return self._acceptance.tokens_per_step()[:, None] / self._costs.ratios()

    def _decide(self) -> None:
        if self._costs is None:
            return
        if self._per_request:  # then the longest forbids nothing
            self._chosen[:] = self.max_speculative_tokens
        else:
            self._chosen = self._gains().argmax(0)
