"""Chooses the draft length of each engine step: the one with the most expected tokens per second, 0 included.

The controller lives in vLLM's scheduler, which sees the batch size and the clock of every step (`vllm/scheduling.py`).
It decides from batch size, step times and acceptance so far, before anything of the next draft is drawn, and so leaves
the distribution of the emitted tokens alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from cotrain.records import GainReport
from cotrain.rollout.speculation.measurement import Measurement
from cotrain.rollout.speculation.served_acceptance import ServedAcceptance
from cotrain.rollout.speculation.step_costs import Array, StepCosts
from cotrain.rollout.speculation.trials import Trials

HYSTERESIS = 0.02
"""Another length has to be faster by this share: less is lost by staying than by following noise. Speculation goes off
as soon as it is expected to cost time."""

DECIDE_STEPS = 16
"""Engine steps from one choice to the next; a choice takes about 0.1 ms."""

CHECKS_KEPT = 8
"""Trials without speculation that the check of the gain rests on, about; older ones are forgotten."""


class Step(NamedTuple):
    """One engine step, as the scheduler saw it."""

    num_speculative_tokens: int
    """Drafted for each request at its end."""
    batch: int
    computes_prompts: bool
    drafts: Sequence[tuple[int, int]]
    """(verified draft tokens, accepted ones) of each request that had drafts."""
    num_tokens: int
    """Generated."""

    @property
    def steady(self) -> bool:
        """Did every request verify as many tokens as it drafted? Only the times of such steps are those of a length."""
        drafting = self.batch if self.num_speculative_tokens else 0
        alike = all(verified == self.num_speculative_tokens for verified, _ in self.drafts)
        return alike and len(self.drafts) == drafting and not self.computes_prompts


class SpeculationController:
    """Draft lengths 0 to K by batch size. K until engine steps were measured: without them it would have to guess."""

    def __init__(self, max_speculative_tokens: int, max_batch: int):
        self.max_speculative_tokens, self.max_batch = max_speculative_tokens, max_batch
        self._acceptance, self._trials = ServedAcceptance(max_speculative_tokens), Trials()
        self._costs: StepCosts | None = None
        self._measurement: Measurement | None = None
        self._fixed: list[int] | None = self._constant(max_speculative_tokens)
        self._chosen = np.zeros(max_batch, np.int64)
        self._learns, self._num_steps = True, 0
        self._step: Step | None = None
        self._before: Step | None = None  # the one before, if its requests go on
        self._started = 0.0
        self._check_error, self._num_checks = 0.0, 0
        self.begin()

    # -- what the engine's owner calls, between two steps ------------------------------------------------------------

    def begin(self, learns: bool = True) -> None:
        """Start a report. Without `learns` its steps, of another sampling, teach nothing about those to come."""
        self._learns = learns
        self._gain = GainReport()
        self._decoded: dict[int, tuple[int, float]] = {}

    def report(self) -> dict[str, Any]:
        """gain: fields of a GainReport. decoded: [batch size, tokens, seconds] of the steps without prompts."""
        gain = asdict(replace(self._gain, num_checks=self._num_checks))
        return {"gain": gain, "decoded": [[batch, *row] for batch, row in self._decoded.items()]}

    def fix_num_speculative_tokens(self, num_speculative_tokens: int | None) -> bool:
        """The same length at every batch size; None gives the choice back. Is the length chosen here from now on?

        Nothing is learnt from the steps of a fixed length.
        """
        if num_speculative_tokens is None and self._costs is None:
            num_speculative_tokens = self.max_speculative_tokens
        self._fixed = None if num_speculative_tokens is None else self._constant(num_speculative_tokens)
        return self._fixed is None

    def begin_measuring(self) -> None:
        """Time the engine steps that follow, at all draft lengths."""
        self._measurement = Measurement(self.max_speculative_tokens, self.max_batch)

    def end_measuring(self) -> int:
        """Choose from now on by the steps since `begin_measuring`. The number of measured (length, batch size); 0: too
        few steps, and the length stays fixed."""
        assert self._measurement is not None
        seconds, self._measurement = self._measurement.seconds, None
        try:
            self._costs = StepCosts(self.max_speculative_tokens, self.max_batch, seconds)
        except ValueError:
            return 0
        self._fixed = None
        self._decide()
        return len(seconds)

    def new_drafter(self, expected_rates: Sequence[float] | None = None) -> None:
        """Another drafter serves from now on.

        expected_rates: acceptance that its evaluation expects, as shares of drafts that accept position i and all
        before it. Without them it is tried at once.
        """
        self._acceptance.new_drafter(expected_rates)
        if expected_rates is None:
            self._trials.at_once()
        self._decide()

    def describe(self) -> str:
        """The choice and its reason in words: k=2 at batch 1 (gain 1.21x), off from batch 2: 0.78x at k=1."""
        if self._fixed is not None:
            return f"k={self._fixed[1]} at every batch size (fixed)"
        gains = self._gains()
        starts = [0, *(np.flatnonzero(np.diff(self._chosen)) + 1).tolist()]
        parts = []
        for start, end in zip(starts, [*starts[1:], self.max_batch], strict=True):
            k, where = int(self._chosen[start]), _batches(start + 1, end, self.max_batch)
            low, high = f"{gains[k, start:end].min():.2f}x", f"{gains[k, start:end].max():.2f}x"
            best = int(gains[1:, start].argmax()) + 1
            on = f"k={k} {where} (gain {low if low == high else f'{low} to {high}'})"
            parts.append(on if k else f"off {where}: {gains[best, start]:.2f}x at k={best}")
        return ", ".join(parts)

    # -- what the scheduler calls in every step; `now` is seconds of one clock -----------------------------------------

    def draft_lengths(self, now: float) -> list[int]:
        """Draft length by batch size, [max_batch + 1], of the step that begins now."""
        self._end_step(now)
        self._started = now
        if self._measurement is not None:
            return self._constant(self._measurement.num_speculative_tokens)
        if self._fixed is not None:
            return self._fixed
        if self._trials.num_speculative_tokens is not None:
            return self._constant(self._trials.num_speculative_tokens)
        return [0, *self._chosen.tolist()]

    def observe(self, step: Step) -> None:
        """What became of it. It ends when the next begins, or with `idle`."""
        self._step = step if step.batch else None

    def idle(self, now: float) -> None:
        """The last request has finished."""
        self._end_step(now)
        if self._before is not None:
            self._end_trial(self._before.batch)
        self._before = None
        if self._costs is not None:
            self._costs.pause()

    def _constant(self, num_speculative_tokens: int) -> list[int]:
        return [num_speculative_tokens] * (self.max_batch + 1)

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        seconds, before, self._before = now - self._started, self._before, step
        if self._learns and (self._fixed is None or self._measurement is not None):
            self._acceptance.observe(step.drafts)
        if step.computes_prompts:
            return
        tokens, total = self._decoded.get(step.batch, (0, 0.0))
        self._decoded[step.batch] = tokens + step.num_tokens, total + seconds
        if self._measurement is not None:
            self._measurement.observe(step.num_speculative_tokens, step.batch, step.steady, seconds)
        elif self._fixed is None and self._costs is not None:
            self._count(self._costs, step, before, seconds)
            if self._learns:
                self._learn(self._costs, step, seconds)

    def _count(self, costs: StepCosts, step: Step, before: Step | None, seconds: float) -> None:
        without = costs.seconds(0, step.batch)
        if step.steady:  # what slowed it would have slowed a step without speculation alike
            without *= seconds / costs.seconds(step.num_speculative_tokens, step.batch)
        without *= step.num_tokens / step.batch
        plain = step.steady and not step.num_speculative_tokens
        self._gain += GainReport(
            num_steps=1,
            seconds=seconds,
            seconds_without=without,
            seconds_without_checked=without if plain else without * float(np.exp(self._check_error)),
            trial_seconds=0.0 if self._trials.num_speculative_tokens is None else seconds,
            longest_draft=0 if before is None else before.num_speculative_tokens,
        )

    def _learn(self, costs: StepCosts, step: Step, seconds: float) -> None:
        error = None
        if step.steady and self._trials.num_speculative_tokens is None:
            costs.follow(step.num_speculative_tokens, step.batch, seconds)
        elif step.steady:
            error = float(np.log(seconds / costs.seconds(step.num_speculative_tokens, step.batch)))
        self._trials.observe(seconds, error)
        self._num_steps += 1
        if self._trials.over:
            self._end_trial(step.batch)
        elif self._num_steps % DECIDE_STEPS == 0:
            self._decide()
        if self._trials.due and costs.knows_pace:
            entry = step.batch - 1
            self._trials.begin(int(self._chosen[entry]), self._gains()[:, entry], costs.ratios()[:, entry])

    def _end_trial(self, batch: int) -> None:
        tried, error = self._trials.num_speculative_tokens, self._trials.end()
        if self._costs is None or tried is None or error is None:
            return
        if tried == 0:
            self._num_checks = min(self._num_checks + 1, CHECKS_KEPT)
            self._check_error += (error - self._check_error) / self._num_checks
        self._costs.correct(tried, batch, error)
        self._decide()

    def _gains(self) -> Array:
        """[K+1, max_batch]: decoding speed against no speculation."""
        assert self._costs is not None
        return self._acceptance.tokens_per_step()[:, None] / self._costs.ratios()

    def _decide(self) -> None:
        if self._costs is None:
            return
        gains, batches = self._gains(), np.arange(self.max_batch)
        best = gains.argmax(0)
        margin = np.where(best == 0, 1.0, 1.0 + HYSTERESIS)
        better = gains[best, batches] > margin * gains[self._chosen, batches]
        self._chosen = np.where(better, best, self._chosen)


def _batches(first: int, last: int, most: int) -> str:
    if first == 1 and last == most:
        return "at every batch size"
    if last == most:
        return f"from batch {first}"
    return f"at batch {first}" if first == last else f"at batch {first} to {last}"
