"""The speculation controller of one engine: learns from its steps, and keeps its table of draft lengths.

Lives in the process that owns the engine; `StepPlanner` is its counterpart in vLLM's scheduler. Nothing here waits for
the engine: `update` takes what the scheduler has logged and writes a new table, between a few times a second and once
a generate call. `step_timing.py` makes the engine steps that it starts from.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from cotrain.config.speculation import SpeculationConfig
from cotrain.records import GainReport
from cotrain.rollout.speculation.draft_length_policy import Gains, choose, gains, trial_lengths, undecided
from cotrain.rollout.speculation.draft_length_table import DraftLengths, DraftLengthTable, StepLog
from cotrain.rollout.speculation.gain_check import GainCheck
from cotrain.rollout.speculation.served_acceptance import KEPT_AFTER_SWAP, KEPT_WHEN_OFF, ServedAcceptance
from cotrain.rollout.speculation.step_cost import StepCostModel, default_batch_sizes

LOG_ENTRIES = 16_384
"""Engine steps that may pass between two updates."""

DOUBT_ROUNDS = 8
"""Times `measure_repeats` that a cell in doubt is timed again at the start: a busy second must not decide for minutes."""

STEPS_PER_PREDICTION = 64
"""Engine steps set against the same prediction of the model before it has learnt from them."""


class SpeculationController:
    """Draft length for each batch size 1..max_batch, from 0 to max_draft_tokens.

    Fixed at max_draft_tokens until the engine's steps have been timed: without them it would have to guess.
    """

    def __init__(self, config: SpeculationConfig, max_draft_tokens: int, max_batch: int, folder: str | Path):
        """Creates the shared files in `folder`, before the engine starts."""
        self.config = config
        self.max_draft_tokens, self.max_batch = max_draft_tokens, max_batch
        self.table_path, self.log_path = str(Path(folder) / "draft_lengths"), str(Path(folder) / "engine_steps")
        self._table = DraftLengthTable(self.table_path, DraftLengths.constant(max_draft_tokens, max_batch))
        self._log = StepLog(self.log_path, max_draft_tokens, create_entries=LOG_ENTRIES)
        self._cost = StepCostModel(max_draft_tokens, max_batch)
        self._timings: list[tuple[int, int, Sequence[float]]] = []
        self._acceptance = ServedAcceptance(max_draft_tokens, max_batch, config.memory_drafts)
        self._check = GainCheck()
        self._chosen = np.zeros(max_batch, np.int64)
        self._last_trial = np.zeros((max_draft_tokens + 1, max_batch), np.int64)
        self._decoded = np.zeros((max_batch, 2))  # tokens and seconds of steps without prompts, by batch size
        self._num_steps = 0
        self._drafted_before = 0  # draft tokens that the newest step in the log asked for
        self._last_batch = 1
        self._trials_at_once = 0
        self._fixed: int | None = max_draft_tokens
        self._timed = False
        self._z = float(norm.ppf(config.confidence))

    @property
    def choosing(self) -> bool:
        """Is the draft length chosen here? False before the first timings, while it is fixed, and when not adaptive."""
        return self._fixed is None

    def timing_plan(self, round_number: int = 0) -> list[tuple[int, int]]:
        """(draft length, batch size) to time at the start, in order; empty when nothing is left to time.

        Round 0 goes over all draft lengths measure_repeats times, in turns, so that a slow minute hits them alike.
        Later ones, DOUBT_ROUNDS times as many, go over what is still in doubt: whether speculation pays, and which
        length is best.
        Raises ValueError for a batch size that the engine cannot run.
        """
        sizes = self.config.measure_batch_sizes or default_batch_sizes(self.max_batch)
        if max(sizes) > self.max_batch:
            raise ValueError(
                f"measure_batch_sizes: {list(sizes)}, but an engine runs at most {self.max_batch} requests at once; "
                "leave out the larger ones"
            )
        if round_number == 0:
            return [(k, size) for size in sizes for k in range(self.max_draft_tokens + 1)] * self.config.measure_repeats
        if round_number > DOUBT_ROUNDS * self.config.measure_repeats:
            return []
        lengths = undecided(self._gains(), self.config.hysteresis)
        return [(k, size) for size in sizes for k in lengths[size - 1]]

    def num_timed(self, draft_tokens: int, batch: int) -> int:
        """Steady engine steps at this length and batch size that wait for `take_timing`."""
        return len(_steady(self._log.waiting(), draft_tokens, batch))

    def take_timing(self, draft_tokens: int, batch: int) -> list[float]:
        """Seconds of the steady steps since the last call or `update`, at this length and batch size.

        Raises RuntimeError without any: too few were decoded, or requests finished.
        """
        steps = self._take_steps()
        for step in steps:
            self._acceptance.observe(int(step["batch"]), step["trials"], step["accepted"])
        wanted = _steady(steps, draft_tokens, batch)
        if not len(wanted):
            raise RuntimeError(f"no steady engine step at k={draft_tokens}, batch {batch} among {len(steps)} steps")
        seconds: list[float] = wanted["seconds"].tolist()
        return seconds

    def begin_timing(self) -> None:
        """Before the first round of `timing_plan`, at the start or on demand."""
        self._timings = []

    def learn_timings(self, timings: Sequence[tuple[int, int, Sequence[float]]]) -> None:
        """(draft length, batch size, seconds of engine steps), as in `timing_plan`; gives the choice back.

        What was learnt of step times before `begin_timing` is forgotten: the rounds since then count together.
        """
        self._timings += timings
        self._cost = StepCostModel(self.max_draft_tokens, self.max_batch)
        self._cost.learn_timings(self._timings)
        self._timed = True
        self.fix_draft_tokens(None)

    def fix_draft_tokens(self, draft_tokens: int | None) -> None:
        """The same length at every batch size from the next engine step on; None gives the choice back.

        Nothing is learnt from the steps of a fixed length. Raises ValueError for a length that the engine was not
        started for.
        """
        if draft_tokens is not None and not 0 <= draft_tokens <= self.max_draft_tokens:
            raise ValueError(f"draft tokens must be 0..{self.max_draft_tokens}, not {draft_tokens}")
        if draft_tokens is None and not (self.config.adaptive and self._timed):
            draft_tokens = self.max_draft_tokens
        if self._fixed is not None:
            self.discard_steps()
        self._fixed = draft_tokens
        if draft_tokens is None:
            self._decide()
        else:
            self._table.write(DraftLengths.constant(draft_tokens, self.max_batch))

    def discard_steps(self) -> None:
        """Learn nothing from the engine steps since the last `update`: they are not like those to come."""
        self._take_steps()
        self._drafted_before = 0

    def take_decoded(self) -> dict[int, tuple[int, float]]:
        """Tokens and seconds of the engine steps since the last call that computed no prompt, by batch size."""
        self.update()
        found = {i + 1: (int(row[0]), float(row[1])) for i, row in enumerate(self._decoded) if row[1]}
        self._decoded[:] = 0
        return found

    def new_drafter(self, expected_rates: Sequence[float] | None = None) -> None:
        """Another drafter serves from now on: where speculation is off, it is tried at once.

        expected_rates: acceptance promised by the drafter's evaluation, if any (drafters.acceptance.acceptance_rates),
        of the first draft position on. Raises ValueError when there are more than draft tokens.
        """
        if expected_rates is not None and not 1 <= len(expected_rates) <= self.max_draft_tokens:
            raise ValueError(
                f"{len(expected_rates)} expected rates for {self.max_draft_tokens} draft tokens; give one a position"
            )
        if self.choosing:
            self._learn()  # what the old one did
        # Where speculation is on, an estimate of a few drafts would switch it off by chance; where it is off, doubt is
        # what lets a trial change that.
        is_on = bool(self._chosen[self._last_batch - 1])
        self._acceptance.new_drafter(KEPT_AFTER_SWAP if is_on else KEPT_WHEN_OFF, expected_rates)
        self._trials_at_once += 1
        self._decide()

    def update(self) -> None:
        """Learn from the engine steps since the last call, and write the table."""
        if self.choosing:
            self._learn()
            self._decide()
        else:
            self.discard_steps()

    def report(self) -> GainReport:
        """What speculation gained over the engine steps since the last call."""
        self.update()
        return self._check.report()

    @property
    def draft_tokens(self) -> list[int]:
        """Draft length of each batch size, [max_batch], as the engine has it."""
        return self._chosen.tolist() if self._fixed is None else [self._fixed] * self.max_batch

    def describe(self, max_batch: int | None = None) -> str:
        """The choice and its reason in words, for batch sizes up to max_batch (default: all).

        For example: k=2 at batch 1 (gain 1.21x), off from batch 2: 0.78x at k=1.
        """
        if self._fixed is not None:
            return f"k={self._fixed} at every batch size (fixed)"
        last = min(max_batch or self.max_batch, self.max_batch)
        chosen, gain = self._chosen[:last], self._gains()
        starts = [0, *(np.flatnonzero(np.diff(chosen)) + 1).tolist()]
        parts = []
        for start, end in zip(starts, [*starts[1:], last], strict=True):
            k, where = int(chosen[start]), _batches(start + 1, end, last)
            values = np.exp(gain.estimate[k, start:end])
            if k:
                low, high = f"{values.min():.2f}x", f"{values.max():.2f}x"
                parts.append(f"k={k} {where} (gain {low if low == high else f'{low} to {high}'})")
            else:
                best = int(gain.estimate[1:, start].argmax()) + 1
                parts.append(f"off {where}: {_why_off(gain, best, start)}")
        return ", ".join(parts)

    def _take_steps(self) -> np.ndarray[Any, np.dtype[Any]]:
        steps = self._log.take()
        decoding = steps[~steps["prefill"]]
        entries = np.minimum(decoding["batch"], self.max_batch).astype(np.int64) - 1
        np.add.at(self._decoded, entries, np.stack([decoding["tokens"], decoding["seconds"]], axis=-1))
        return steps

    def _learn(self) -> None:
        steps = self._take_steps()
        for start in range(0, len(steps), STEPS_PER_PREDICTION):
            chunk = steps[start : start + STEPS_PER_PREDICTION]
            seconds, (tokens, _) = self._cost.seconds(), self._acceptance.tokens_per_step()
            log_ratios = np.log(seconds / seconds[0])
            for step in chunk:
                k, batch = int(step["draft_tokens"]), int(step["batch"])
                entry = min(batch, self.max_batch) - 1
                self._last_batch = entry + 1
                self._num_steps += 1
                if not step["prefill"]:
                    chosen, expected = self.draft_tokens[entry], float(tokens[k, entry])
                    of_model = (expected, float(seconds[0, entry]), log_ratios[:, entry])
                    self._check.observe(step, self._drafted_before, chosen, *of_model)
                self._drafted_before = k
                if step["trial"]:
                    octave = batch.bit_length()
                    self._last_trial[k, 2 ** (octave - 1) - 1 : 2**octave - 1] = self._num_steps
                if step["steady"]:
                    self._cost.observe(k, batch, float(step["seconds"]))
                self._acceptance.observe(batch, step["trials"], step["accepted"])

    def _gains(self) -> Gains:
        return gains(self._acceptance.tokens_per_step(), self._cost.seconds(), self._cost.ratio_error(), self._z)

    def _decide(self) -> None:
        if self._fixed is not None:
            return
        gain = self._gains()
        self._chosen = choose(self._chosen, gain, self.config.hysteresis)
        trials = trial_lengths(self._chosen, gain, self._last_trial)
        per_step = self._cost.seconds()[trials, np.arange(self.max_batch)]
        self._table.write(
            DraftLengths(
                draft_tokens=(0, *self._chosen.tolist()),
                trial_tokens=(-1, *trials.tolist()),
                trial_seconds=(0.0, *(per_step * self.config.probe_steps).tolist()),
                trial_share=self.config.probe_share,
                trial_steps=self.config.probe_steps,
                trials_at_once=self._trials_at_once,
            )
        )


def speculation_metrics(report: GainReport) -> dict[str, float]:
    """As rollout/... metrics; values that are not known yet are left out."""
    values: dict[str, Any] = asdict(report) | {"disagreement": report.disagreement}
    names = {
        "speedup_vs_no_speculation": "rollout/speedup_vs_no_speculation",
        "model_gain": "rollout/speculation_gain",
        "measured_gain": "rollout/speculation_gain_measured",
        "measured_error": "rollout/speculation_gain_measured_error",
        "disagreement": "rollout/speculation_gain_disagreement",
        "trial_share": "rollout/speculation_trial_share",
    }
    return {metric: float(values[name]) for name, metric in names.items() if values[name] is not None}


def _steady(steps: np.ndarray[Any, np.dtype[Any]], draft_tokens: int, batch: int) -> np.ndarray[Any, np.dtype[Any]]:
    return steps[steps["steady"] & (steps["draft_tokens"] == draft_tokens) & (steps["batch"] == batch)]


def _batches(first: int, last: int, most: int) -> str:
    if last == most and first > 1:
        return f"from batch {first}"
    if first == last:
        return f"at batch {first}"
    return "at every batch size" if first == 1 and last == most else f"at batch {first} to {last}"


def _why_off(gain: Gains, best: int, entry: int) -> str:
    value, lower = (float(np.exp(table[best, entry])) for table in (gain.estimate, gain.lower))
    if gain.ceiling[best, entry] < 0:
        return f"{value:.2f}x at k={best}, and no drafter could make it pay"
    return f"{value:.2f}x at k={best}" + (f", not certain to pay (at least {lower:.2f}x)" if value >= 1 else "")
