"""When the drafter trains: always, in every n-th step, or while it pays and when acceptance drifts.

Drift has two signs. The acceptance length is below the best of the last steps (the policy has moved away), or what
the engines serve is below what the trainer expects of the served weights (something between them is wrong or stale).
Whether training pays is measured, from what the last sessions gained and how long they took; a pause ends with a trial
session now and then, because only a session can tell whether there is something to gain again.
"""

from collections import deque
from dataclasses import asdict, dataclass
from math import isfinite, nan, sqrt
from typing import Any

from cotrain.config.gate import GateConfig
from cotrain.publish.expected import Estimate, noise_bound
from cotrain.publish.gate import Pace

SMOOTHING_STEPS = 4
"""Steps whose mean is one level: the prompts of a single step make it too noisy."""

SESSION_WEIGHT = 0.5
"""Weight of the newest session in the running means of gain and seconds."""


@dataclass(frozen=True, slots=True)
class TrainDecision:
    """Train in this step or not, and why. Numbers are NaN where they are not known."""

    train: bool
    reason: str
    gap: float = nan
    """Best level of the last steps minus the present one."""
    gap_bound: float = nan
    """Drift when the gap is above it."""
    shortfall: float = nan
    """Expected minus served acceptance length of the last step."""
    shortfall_bound: float = nan
    """Drift when the shortfall is above it."""
    seconds_saved: float = nan
    """By another session, if it gains what the last ones did."""
    session_seconds: float = nan
    """What a session costs."""

    def metrics(self) -> dict[str, float]:
        """Every finite number, as trigger/<name>."""
        numbers = {name: value for name, value in asdict(self).items() if not isinstance(value, str)}
        return {f"trigger/{name}": float(value) for name, value in numbers.items() if isfinite(value)}


class TrainTrigger:
    """Call observe and decide once a step, and record_session after each session that was trained."""

    def __init__(self, config: GateConfig, train_every: int):
        self._config, self._train_every = config, train_every
        self._recent: deque[Estimate] = deque(maxlen=SMOOTHING_STEPS)
        self._levels: deque[Estimate] = deque(maxlen=config.ceiling_steps)
        self._last: tuple[Estimate | None, Estimate | None] = (None, None)
        self._gain = self._seconds = nan
        self._sessions = self._unpaid = 0
        self._pause = 0  # steps without training

    def observe(self, level: Estimate | None, expected: Estimate | None, served: Estimate | None) -> None:
        """Acceptance lengths of the served drafter in this step.

        level: expected at the same draft length in every step, so that levels of two steps can be compared. expected,
        served: at the draft lengths of this step, by the trainer's scores and by the engines' counts.
        """
        self._last = (expected, served)
        if (present := level or served) is None:
            return
        self._recent.append(present)
        num_steps = len(self._recent)
        self._levels.append(
            Estimate(
                sum(estimate.value for estimate in self._recent) / num_steps,
                sqrt(sum(estimate.standard_error**2 for estimate in self._recent)) / num_steps,
                sum(estimate.num_groups - 1 for estimate in self._recent) + 1,
            )
        )

    def record_session(self, gain: float, seconds: float) -> None:
        """One session: acceptance length after minus before it on the same rollouts, and seconds it held up the run.

        Raises ValueError for a gain that is not finite, or seconds that are not finite and not negative.
        """
        if not isfinite(gain):
            raise ValueError(f"gain is {gain}; score the drafter before and after the session on held-out rollouts")
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds is {seconds}; give the measured seconds of the session")
        weight = SESSION_WEIGHT if self._sessions else 1.0
        self._gain = gain if weight == 1 else (1 - weight) * self._gain + weight * gain
        self._seconds = seconds if weight == 1 else (1 - weight) * self._seconds + weight * seconds
        self._sessions += 1

    def decide(self, step: int, pace: Pace | None) -> TrainDecision:
        """Train in this step? pace is None while nothing is drafted: then no session saves anything."""
        mode = self._config.train_when
        if mode == "always":
            return TrainDecision(True, "trains in every step")
        if mode == "every":
            train = step % self._train_every == 0
            return TrainDecision(train, f"trains in every {self._train_every}. step")
        decision = self._by_drift(pace)
        self._pause = 0 if decision.train else self._pause + 1
        return decision

    def state(self) -> dict[str, Any]:
        """Everything an exact continuation needs, as plain numbers."""
        return {
            "recent": [asdict(estimate) for estimate in self._recent],
            "levels": [asdict(estimate) for estimate in self._levels],
            "sessions": [self._gain, self._seconds, self._sessions, self._unpaid, self._pause],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the estimates of the last step come with the next `observe`."""
        for estimates, saved in ((self._recent, state["recent"]), (self._levels, state["levels"])):
            estimates.clear()
            estimates.extend(Estimate(**numbers) for numbers in saved)
        self._gain, self._seconds, self._sessions, self._unpaid, self._pause = state["sessions"]

    def _by_drift(self, pace: Pace | None) -> TrainDecision:
        gap, gap_bound = self._gap()
        shortfall, shortfall_bound = self._shortfall()
        saved = self._seconds_saved(pace)
        numbers = (gap, gap_bound, shortfall, shortfall_bound, saved, self._seconds)
        drifted = gap > gap_bound or shortfall > shortfall_bound
        if not drifted:
            self._unpaid = 0
        if self._sessions < self._config.patience:
            return TrainDecision(True, "not yet known whether training pays", *numbers)
        if saved > self._seconds:
            self._unpaid = 0
            return TrainDecision(True, f"saves {saved:.2f} s, takes {self._seconds:.2f} s", *numbers)
        if drifted and self._unpaid < self._config.patience:
            self._unpaid += 1
            sign = f"{gap:.3f} below its best" if gap > gap_bound else f"served {shortfall:.3f} below expected"
            return TrainDecision(True, f"acceptance length has drifted: {sign}", *numbers)
        if self._pause + 1 >= self._config.explore_every:
            return TrainDecision(True, f"tried again after {self._pause} steps without training", *numbers)
        cause = "drifted, but training does not help" if drifted else "no drift, and training does not pay"
        return TrainDecision(False, cause, *numbers)

    def _gap(self) -> tuple[float, float]:
        """Below the best level, and the bound for the best of as many levels."""
        if len(self._levels) < 2:
            return nan, nan
        *before, present = self._levels
        best = max(before, key=lambda level: level.value)
        bound = noise_bound(best, present, self._config.drift_alpha / len(before))
        return best.value - present.value, self._config.drift_gap + bound

    def _shortfall(self) -> tuple[float, float]:
        expected, served = self._last
        if expected is None or served is None:
            return nan, nan
        return expected.value - served.value, noise_bound(expected, served, self._config.drift_alpha)

    def _seconds_saved(self, pace: Pace | None) -> float:
        """By one more session. The gain counts from the present level; a loss saves nothing."""
        if pace is None:
            return 0.0
        if not self._levels or not self._sessions:
            return nan
        level = self._levels[-1].value
        return self._config.gain_lifetime * pace.seconds_saved(level, level + max(self._gain, 0.0))
