"""One step of a run: its result, as the metrics and records are made of it, and the clock of its phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cotrain.config.schema import RunConfig
from cotrain.loop.windows import StepWindow
from cotrain.publish.decision import DrafterEvent, Outcome
from cotrain.records import Prompt, ScoredRollout, SwapReport, Versions
from cotrain.run.console import Console
from cotrain.run.step_metrics import idle_metrics, lag_metrics, reward_metrics, rollout_metrics

LONG_QUEUE = 0.1  # share of a step above which waiting for busy scorers is worth a note


class Clock:
    """Seconds of the phases of a step, each shown on the console while it runs."""

    def __init__(self, console: Console):
        self._console, self._began = console, time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        began = time.perf_counter()
        with self._console.phase(name.replace("_", " "), terminal_only=True):
            yield
        self.seconds[name] = time.perf_counter() - began

    @property
    def step_seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began


@dataclass(frozen=True)
class StepResult:
    """A step that has ended."""

    step: int
    served: Versions  # the versions in force when the step began
    scored: list[ScoredRollout]  # what the policy was trained on
    prompts: dict[str, Prompt]  # the prompts of these rollouts by id
    window: StepWindow
    stream: dict[str, float]  # metrics of the groups in flight when the step began
    history: dict[str, float]  # metrics of the index, where engines draft from history
    lossless: dict[str, float]  # metrics of a check of the distribution
    outcomes: list[Outcome]  # what was decided about the drafter, in order
    learned: dict[str, float]  # metrics of the policy's update and of the drafter's training
    swaps: dict[str, SwapReport]  # weight updates by role
    seconds: dict[str, float]  # duration of each phase; "step" is the whole step

    @property
    def events(self) -> list[DrafterEvent]:
        """What happened to the drafter."""
        return [event for outcome in self.outcomes for event in outcome.events]

    @property
    def advice(self) -> str:
        """A note for the step line; empty unless busy scorers held the step up."""
        queue = self.seconds["reward_queue"]
        held_up = queue > LONG_QUEUE * self.seconds["step"]
        return f"{queue:.1f}s for busy scorers: raise task.num_scorers" if held_up else ""

    def row(self, config: RunConfig) -> dict[str, float]:
        """Return the metrics of the step."""
        lags, num_engines = config.stream.max_policy_lag > 0, config.rollout.num_engines
        batch = self.window.batch
        rollouts = [one.rollout for one in self.scored]
        row = self.stream | lag_metrics(rollouts, self.served.policy)
        row |= reward_metrics(self.scored) | rollout_metrics(rollouts, batch, num_engines)
        row |= self.lossless | self.history
        for outcome in self.outcomes:
            row |= outcome.metrics
        row |= self.learned
        for role, swap in self.swaps.items():
            row |= {f"{role}/swap_s": swap.seconds, f"{role}/swap_bytes": swap.num_bytes}
        row |= {"versions/policy": self.served.policy, "versions/drafter": self.served.drafter}
        row |= {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        span = batch.seconds if lags else self.seconds["step"]
        return row | idle_metrics(row, self.window.busy_seconds(num_engines), span, config.drafter is not None)
