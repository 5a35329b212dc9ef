"""What speculation gains, by the cost model and by steps without speculation put in between.

The model says what the tokens of a step would have cost without speculation. The check sets the model's two parts
against what was seen: tokens of a step against those expected, and the time of trial steps without speculation against
that of speculating steps next to them at the same batch size, medians both.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from cotrain.records import GainReport

NEIGHBOURS = 32
"""Speculating steps that a trial without speculation is compared with, at most: the latest before it."""

LEAST_STEPS = 3
"""Steps on either side of a comparison, so that one late step does not decide its medians."""

CHECKS_KEPT = 64
"""Trials that the measured gain rests on, at most."""


class GainCheck:
    """Adds up engine steps until `report`. The checks themselves are kept beyond it."""

    def __init__(self) -> None:
        self._neighbours: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=NEIGHBOURS))
        self._check: list[float] = []
        self._check_model: dict[int, float] = {}
        self._check_batch = 0
        self._cost_residuals: deque[float] = deque(maxlen=CHECKS_KEPT)
        self._start()

    def _start(self) -> None:
        self._seconds = self._seconds_without = self._trial_seconds = 0.0
        self._mixed_without = self._steady_seconds = self._steady_model = 0.0
        self._model_with = self._model_without = 0.0
        self._tokens = self._expected_tokens = 0.0
        self._num_steps = self._longest_draft = 0

    def observe(
        self,
        step: np.void,
        drafted_before: int,
        chosen: int,
        expected_tokens: float,
        seconds_without: float,
        log_ratios: np.ndarray,
    ) -> None:
        """One log entry that is no prefill.

        drafted_before: draft tokens that the step before asked for, which this step verifies if it goes on with the
        same requests, as a step without prompts does. chosen: the table's draft length at this batch size. Of the
        model: tokens one request was expected to get in such a step, seconds of it without speculation, log t_k / t_0
        [K+1] at this batch size.
        """
        batch, k, seconds = int(step["batch"]), int(step["draft_tokens"]), float(step["seconds"])
        self._num_steps += 1
        self._longest_draft = max(self._longest_draft, drafted_before)
        self._seconds += seconds
        self._trial_seconds += seconds if step["trial"] else 0.0
        self._collect_check(step, chosen, log_ratios)
        tokens, without = float(step["tokens"]) / batch, seconds_without
        if not step["steady"]:
            self._mixed_without += tokens * without
            return
        ratio = float(np.exp(log_ratios[k]))
        # What slowed this step would have slowed one without speculation alike.
        self._seconds_without += tokens * seconds / ratio
        self._steady_seconds += seconds
        self._steady_model += without * ratio
        if k == 0 or k != chosen or step["trial"]:
            return
        self._neighbours[batch].append((k, seconds))
        self._model_with += without * ratio
        self._model_without += expected_tokens * without
        self._tokens += tokens * without
        self._expected_tokens += expected_tokens * without

    def report(self) -> GainReport:
        """Of the steps since the last call."""
        self._finish_check()
        model_gain = self._model_without / self._model_with if self._model_with else 1.0
        residuals = np.array(self._cost_residuals)
        measured = error = None
        if self._model_with and len(residuals):
            measured = model_gain * self._tokens / self._expected_tokens * float(np.exp(-np.median(residuals)))
        if measured is not None and len(residuals) > 1:
            spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
            error = 1.25 * spread / len(residuals) ** 0.5  # 1.25: of a median against a mean
        pace = self._steady_seconds / self._steady_model if self._steady_model else 1.0
        without = float(self._seconds_without + self._mixed_without * pace)
        report = GainReport(
            speedup_vs_no_speculation=without / self._seconds if self._seconds else 1.0,
            model_gain=model_gain,
            measured_gain=measured,
            measured_error=error,
            num_checks=len(residuals),
            trial_share=self._trial_seconds / self._seconds if self._seconds else 0.0,
            num_steps=self._num_steps,
            seconds=self._seconds,
            longest_draft=self._longest_draft,
        )
        self._start()
        return report

    def _collect_check(self, step: np.void, chosen: int, log_ratios: np.ndarray) -> None:
        batch = int(step["batch"])
        belongs = bool(step["trial"]) and step["steady"] and step["draft_tokens"] == 0 and chosen > 0
        if self._check and (not belongs or batch != self._check_batch):
            self._finish_check()
        if belongs:
            if not self._check:
                # The model as it was before it learnt from this trial
                self._check_batch = batch
                self._check_model = dict(enumerate(log_ratios.tolist()))
            self._check.append(float(step["seconds"]))

    def _finish_check(self) -> None:
        neighbours = self._neighbours[self._check_batch]
        k = neighbours[-1][0] if neighbours else 0
        beside = [seconds for length, seconds in neighbours if length == k]
        if min(len(beside), len(self._check)) >= LEAST_STEPS:
            ratio = float(np.log(np.median(beside)) - np.log(np.median(self._check)))
            self._cost_residuals.append(ratio - self._check_model[k])
        self._check = []


def combined(reports: Sequence[GainReport]) -> GainReport | None:
    """Of several engines at work at the same time: means weighted by the time of their steps. None of none."""
    if not reports:
        return None
    seconds = sum(report.seconds for report in reports)
    shares = [report.seconds / seconds if seconds else 1 / len(reports) for report in reports]
    measured = [(share, report) for share, report in zip(shares, reports, strict=True) if report.measured_gain]
    errors = [(share, report.measured_error) for share, report in measured if report.measured_error is not None]
    weight = sum(share for share, _ in measured)

    def mean(name: str) -> float:
        return sum(share * getattr(report, name) for share, report in zip(shares, reports, strict=True))

    return GainReport(
        speedup_vs_no_speculation=mean("speedup_vs_no_speculation"),
        model_gain=mean("model_gain"),
        measured_gain=sum(share * (r.measured_gain or 0.0) for share, r in measured) / weight if weight else None,
        # Of a mean of independent estimates; None when one of them has no error of its own
        measured_error=(
            sum((share * error) ** 2 for share, error in errors) ** 0.5 / weight
            if weight and len(errors) == len(measured)
            else None
        ),
        num_checks=sum(report.num_checks for report in reports),
        trial_share=mean("trial_share"),
        num_steps=sum(report.num_steps for report in reports),
        seconds=seconds,
        longest_draft=max(report.longest_draft for report in reports),
    )
