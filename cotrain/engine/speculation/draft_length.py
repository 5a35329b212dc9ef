"""Chooses the draft length of each engine step, 0 included: the one with the most expected tokens per second.

The choice is made in vLLM's scheduler, which sees the batch size and the clock of every step (`scheduling.py`), from batch
size, step costs and acceptance so far, before any token of the next draft is drawn. So it does not change the distribution of
the emitted tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cotrain.engine.speculation.measurement import Measurement
from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from cotrain.engine.speculation.step_costs import QUANTILE, Array, ratio_at, step_ratios
from cotrain.records import GainReport

DECIDE_STEPS = 16
"""Engine steps from one choice to the next; a choice takes about 0.1 ms."""

PROBE_STEPS = 64
"""Every so many steps, one drafts more than was chosen, so that a drafter that has become better is noticed. One token more costs at
most 0.8 % of the decoding time on two cores, where t_1 / t_0 is 1.53 with 32 requests."""


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
    from_history: bool = False
    """Whether the verified drafts came from history."""
    has_passes: bool = True
    """Whether the drafter ran at the end of the step."""

    @property
    def steady(self) -> bool:
        """Whether every request verified as many tokens as this step drafts. Only then is its time that of a draft length."""
        drafting = self.batch if self.num_speculative_tokens else 0
        alike = all(verified == self.num_speculative_tokens for verified, _ in self.drafts)
        return alike and len(self.drafts) == drafting and not self.computes_prompts


class Plan(NamedTuple):
    """What HistoryDrafting has to know of a step, to choose between history and the drafter."""

    measures: str
    """The proposer, "drafter" or "history", whose steps are being measured; empty while none are."""
    ratios: list[float] | None
    """t_k / t_0 [K+1] of drafts from history at this batch size. None while the length is fixed or measured."""
    drafter_length: int
    """Draft length of every request if the drafter proposes."""
    drafter_speed: float
    """Expected decoding speed with the drafter relative to no speculation; without ratios, the expected tokens of a step."""
    probes: str
    """The proposer that drafts in this step whether it pays or not, a token more than it would; empty in most steps."""


@dataclass
class Sums:
    """What the steps of a report add up to."""

    without: Array
    """[max_batch] what the tokens generated at a batch size would have taken without speculation, in seconds."""
    gain: GainReport = field(default_factory=GainReport)
    totals: dict[tuple[int, int, str], list[float]] = field(default_factory=dict)
    """(draft length, batch size, kind) -> number, tokens and seconds of engine steps, see StepTotal."""


class DraftLengths:
    """Chooses a draft length from 0 to K for each batch size. It stays at K until engine steps have been measured.

    Where steps were measured with drafts from history, the worker decides in each step whether history or the drafter proposes.
    """

    def __init__(self, max_speculative_tokens: int, max_batch: int):
        self.max_speculative_tokens = max_speculative_tokens
        self._acceptance = ServedAcceptance(max_speculative_tokens)
        self._ratios: dict[str, Array] = {}  # of steps that draft with each proposer, [K+1, max_batch]
        self._measurement: Measurement | None = None
        self._fixed: int | None = max_speculative_tokens
        self._chosen = np.zeros(max_batch, np.int64)
        self._num_steps = 0
        self._step: Step | None = None
        self._before: Step | None = None  # the step before that one, if its requests go on
        self._started = 0.0
        self.begin()

    # -- what the engine's owner calls, between two steps ------------------------------------------------------------

    def begin(self, learns: bool = True) -> None:
        """Start a report. learns: False if its steps sample in another way, so that nothing must be learnt from them."""
        self._learns, self._sums = learns, Sums(np.zeros(len(self._chosen)))

    def report(self) -> dict[str, Any]:
        """Return the report and start the next. gain: fields of a GainReport. steps: the fields of each StepTotal."""
        without = self._sums.without
        gain = replace(self._sums.gain, seconds_without=float(without.sum()))
        if self._ratios:
            seconds_at = without * next(iter(self._ratios.values()))
            gain = replace(gain, seconds_at=seconds_at.T[without > 0].tolist())
        steps = [[*key, *total] for key, total in self._sums.totals.items()]
        self.begin(self._learns)
        return {"gain": asdict(gain), "steps": steps}

    def fix_num_speculative_tokens(self, num_speculative_tokens: int | None) -> bool:
        """Use this length at every batch size; None chooses again. Returns whether lengths are chosen from now on.

        None means the longest while nothing has been measured.
        """
        if num_speculative_tokens is None and not self._ratios:
            num_speculative_tokens = self.max_speculative_tokens
        self._fixed = num_speculative_tokens
        return self._fixed is None

    def begin_measuring(self, proposer: str = "drafter", live: bool = False) -> None:
        """Time the engine steps that follow, at all draft lengths. Measure the drafter first, if there is one.

        proposer: in steps of "history" the drafter does not run. live: see Measurement.
        """
        self._measurement = Measurement(proposer, self.max_speculative_tokens, len(self._chosen), live)

    @property
    def has_measured(self) -> bool:
        """Whether enough live steps were timed since `begin_measuring`."""
        return self._measurement is not None and self._measurement.is_complete

    def end_measuring(self) -> list[list[float]]:
        """Choose from now on by the steps since `begin_measuring`, which no report counts. Returns rows of [draft length, batch
        size, seconds, their relative standard error, steps], or none after too few steps; the choice then stays as it was."""
        measurement, self._measurement = self._measurement, None
        self.begin(self._learns)
        seconds = {} if measurement is None else measurement.seconds()
        try:
            ratios = step_ratios(self.max_speculative_tokens, len(self._chosen), seconds)
        except ValueError:
            return []
        assert measurement is not None
        self._ratios[measurement.proposer], self._fixed = ratios, None
        self._decide()
        rows = (
            (*cell, np.quantile(s, QUANTILE), np.log(s).std() / len(s) ** 0.5, len(s)) for cell, s in seconds.items()
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
        if "history" in self._ratios:
            return f"k=0 to {self.max_speculative_tokens}, chosen for each request"
        gains, parts = self._gains(), []
        for batches in np.split(np.arange(len(self._chosen)), np.flatnonzero(np.diff(self._chosen)) + 1):
            k, first, last = int(self._chosen[batches[0]]), batches[0] + 1, batches[-1] + 1
            where = f"at batch {first}" + (f" to {last}" if last > first else "")
            best = int(gains[1:, batches[0]].argmax()) + 1
            low, high = (f"{bound:.2f}x" for bound in (gains[k, batches].min(), gains[k, batches].max()))
            on = f"k={k} {where} (gain {low if low == high else f'{low} to {high}'})"
            parts.append(on if k else f"off {where}: {gains[best, batches[0]]:.2f}x at k={best}")
        return ", ".join(parts)

    # -- what the scheduler calls in every step; `now` is seconds of one clock -----------------------------------------

    def choose(self, now: float) -> list[int]:
        """Return the draft length of the step that begins now, by batch size [max_batch + 1]."""
        self._end_step(now)
        self._started = now
        self._num_steps += 1
        if self._learns and self._num_steps % DECIDE_STEPS == 0:
            self._decide()
        length = self._fixed if self._measurement is None else self._measurement.length
        if length is None and "history" in self._ratios:  # then the longest forbids nothing
            length = self.max_speculative_tokens
        if length is not None:
            return [length] * (len(self._chosen) + 1)
        more = self._learns and bool(self._probes)
        return [0, *np.minimum(np.add(self._chosen, more), self.max_speculative_tokens).tolist()]

    def plan(self, batch: int) -> Plan:
        """Return the plan of the step that has begun, with so many requests."""
        if self._measurement is not None:
            proposer = self._measurement.proposer
            return Plan(proposer, None, self._measurement.length if proposer == "drafter" else 0, 1.0, "")
        if self._fixed is not None:
            return Plan("", None, self._fixed, float(self._acceptance.tokens_per_step()[self._fixed]), self._probes)
        k, history = int(self._chosen[batch - 1]), self._ratios.get("history")
        speed = float(self._gains()[k, batch - 1]) if history is not None and "drafter" in self._ratios else 1.0
        probes = self._probes if self._learns else ""
        k = min(k + (probes == "drafter"), self.max_speculative_tokens)
        return Plan("", None if history is None else history[:, batch - 1].tolist(), k, speed, probes)

    def observe(self, step: Step) -> None:
        """Take note of what the current step did. Its time ends when the next step begins, or with `idle`."""
        self._step = step if step.batch else None

    def left_passes_out(self) -> None:
        """Mark the last step as having skipped the drafter."""
        if self._step is not None:
            self._step = self._step._replace(has_passes=False)

    def idle(self, now: float) -> None:
        """End the last step, because no other follows at once: all requests have finished, or the engine pauses."""
        self._end_step(now)
        self._started, self._before = now, None

    @property
    def _probes(self) -> str:
        """The proposer that this step tries, in turn; empty in most steps."""
        turn, rest = divmod(self._num_steps, PROBE_STEPS)
        proposers = tuple(self._ratios) or ("drafter", "history")
        return "" if rest else proposers[turn % len(proposers)]

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        seconds, before, self._before = now - self._started, self._before, step
        if self._learns and not step.from_history:
            self._acceptance.observe(step.drafts)
        kind = "prompts" if step.computes_prompts else "steady" if step.steady else "mixed"
        total = self._sums.totals.setdefault((step.num_speculative_tokens, step.batch, kind), [0, 0, 0.0])
        total[:] = total[0] + 1, total[1] + step.num_tokens, total[2] + seconds
        if step.computes_prompts:
            return
        if self._measurement is not None:
            self._measurement.observe(step.num_speculative_tokens, step.batch, step.steady, seconds)
        elif self._fixed is None and self._ratios:
            self._count(step, before, seconds)

    def _count(self, step: Step, before: Step | None, seconds: float) -> None:
        """Count what a step gained. Whatever slowed it would have slowed one without drafts as much, so only the ratio of the
        two counts. It is at least 1, so no step gains more than the tokens that it emits."""
        length = sum(verified for verified, _ in step.drafts) / step.batch
        longest = max((verified for verified, _ in step.drafts), default=0)  # the worker decides, and may draft nothing
        proposer = next(iter(self._ratios))
        if "history" not in self._ratios:
            # At a change of length, a step drafts another number of tokens than it verifies.
            length = (length + step.num_speculative_tokens) / 2
            longest = 0 if before is None else before.num_speculative_tokens
        elif not step.has_passes:
            proposer = "history"
        ratio = ratio_at(self._ratios[proposer][:, step.batch - 1].tolist(), length)
        self._sums.without[step.batch - 1] += seconds * step.num_tokens / step.batch / ratio
        self._sums.gain += GainReport(seconds=seconds, longest_draft=longest)

    def _gains(self) -> Array:
        """Return the expected decoding speed relative to no speculation, [K+1, max_batch]."""
        return self._acceptance.tokens_per_step()[:, None] / self._ratios["drafter"]

    def _decide(self) -> None:
        if "drafter" in self._ratios:
            self._chosen = self._gains().argmax(0)
