"""A step of a run: the clock of its phases, what the engines generate and measure meanwhile, and its result.

Without lag, a window of the engines is a step; with lag, it ends with one.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import fmean

from cotrain.acceptance_stats import counts_of
from cotrain.config.schema import RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.loop.roles import Roles
from cotrain.process.failures import RunFailure
from cotrain.publish.decision import Outcome
from cotrain.records import GainReport, Prompt, Rollout, RolloutBatch, ScoredRollout, StepTotal, SwapReport, Versions
from cotrain.run.console import Console
from cotrain.run.step_metrics import lag_metrics, rollout_metrics, speculation_metrics
from cotrain.transport.nodes import Coming


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


class Windows:
    """Collects the batches of finished groups until a window takes them."""

    def __init__(self, roles: Roles, lags: bool, lost_features: int = 0):
        """lags: whether generation runs ahead of learning. lost_features: rollouts whose hidden states were lost before."""
        self._roles, self._lags = roles, lags
        self.lost_features, self.tool_share = lost_features, 0.0  # tool_share: of the newest group
        self._batches: list[tuple[tuple[int, int], RolloutBatch]] = []
        self._began, self._waited = time.perf_counter(), 0.0

    def add(self, engine: int, batch: RolloutBatch, place: int = 0) -> None:
        """Add what an engine has generated for a group. place: of the group among those that entered the engine together.

        A window has its batches by engine and place, so that without lag their order is always the same.
        """
        self._batches.append(((engine, place), batch))
        self.tool_share = batch.tool_share

    def take(self, rollouts: list[Rollout], waited: float = 0.0) -> tuple[RolloutBatch, dict[int, list[StepTotal]]]:
        """End the window. Returns what the engines have generated and measured in it, and the steps of each engine.

        rollouts: those of the step, which are the window's own without lag. waited: seconds for them, with lag. With lag and no
        group that has ended, the window is empty, and what the engines measure and the time count in the next one. Hidden states
        are brought to the trainer's node; where a node is gone, its rollouts count as lost features.
        """
        self._waited += waited
        if not self._batches:
            return RolloutBatch([], [], 0.0, 0), {}
        # Batches of one place stay in the order in which they ended.
        batch = merge(self._brought([batch for _, batch in sorted(self._batches, key=itemgetter(0))]))
        self._batches.clear()
        seen = self._roles.engines.call_all(RolloutEngine.take_window)
        gains = [window.gain for window in seen.values() if window.gain is not None]
        batch = replace(batch, gain=sum(gains, start=GainReport()) if gains else None)
        if self._lags:
            now = time.perf_counter()
            seconds, self._began = now - self._began, now
            batch = replace(batch, seconds=seconds, exposed=min(1.0, self._waited / seconds))
        else:
            batch = replace(batch, rollouts=rollouts)
        self._waited = 0.0
        return batch, {engine: window.steps for engine, window in seen.items()}

    def state(self) -> int:
        """Rollouts whose hidden states are lost to a run that is resumed from here."""
        return self.lost_features + sum(int(batch.feature_stats.get("num_rollouts", 0)) for _, batch in self._batches)

    def _brought(self, batches: list[RolloutBatch]) -> list[RolloutBatch]:
        """Bring all hidden states to the trainer's node, all at once."""
        drafter, nodes = self._roles.drafter, self._roles.nodes
        if drafter is None:
            return batches
        coming = [[nodes.begin_bring(path, drafter.node, move=True) for path in batch.features] for batch in batches]
        return [self._arrived(batch, of_batch) for batch, of_batch in zip(batches, coming, strict=True)]

    def _arrived(self, batch: RolloutBatch, coming: list[Coming]) -> RolloutBatch:
        try:
            return replace(batch, features=[self._roles.nodes.arrived(one) for one in coming])
        except RunFailure:
            self.lost_features += int(batch.feature_stats["num_rollouts"])
            return replace(batch, features=[], feature_stats={})


def merge(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Merge batches that engines generated at the same time; `seconds` is that of the slowest."""
    stats, rollouts = Counter[str](), [rollout for batch in batches for rollout in batch.rollouts]
    for batch in batches:
        stats.update(batch.feature_stats)
    return RolloutBatch(
        rollouts=rollouts,
        features=[shard for batch in batches for shard in batch.features],
        seconds=max(batch.seconds for batch in batches),
        num_generated_tokens=sum(batch.num_generated_tokens for batch in batches),
        feature_stats=dict(stats),
        speculation=counts_of(rollouts),
        tool_share=fmean(batch.tool_share for batch in batches),
    )


@dataclass(frozen=True)
class StepResult:
    """A step that has ended. It has a field for each source, so that a metric can be followed to what measured it."""

    step: int
    served: Versions  # the versions in force when the step began
    scored: list[ScoredRollout]  # what the policy was trained on
    prompts: dict[str, Prompt]  # the prompts of these rollouts by id
    batch: RolloutBatch  # what the engines have generated and measured since the last window
    engine_steps: dict[int, list[StepTotal]]  # by engine
    stream: dict[str, float]  # metrics of the groups in flight when the step began
    lossless: dict[str, float]  # metrics of a check of the distribution
    history: dict[str, float]  # metrics of the index, where engines draft from history
    outcomes: list[Outcome]  # what was decided about the drafter, in order
    learned: dict[str, float]  # metrics of the policy's update and of the drafter's training
    swaps: dict[str, SwapReport]  # weight updates by role
    saved: dict[str, float]  # metrics of the newest checkpoint
    seconds: dict[str, float]  # duration of each phase; "step" is the whole step

    def row(self, config: RunConfig) -> dict[str, float]:
        """Return the metrics of the step."""
        lags, num_engines, batch = config.stream.max_policy_lag > 0, config.rollout.num_engines, self.batch
        rollouts = [one.rollout for one in self.scored]
        row = lag_metrics(rollouts, self.served.policy) | rollout_metrics(rollouts, batch, num_engines)
        row |= speculation_metrics(rollouts) if config.speculates else {}
        row["policy/reward"] = sum(one.reward for one in self.scored) / len(self.scored)
        row["policy/groups_with_signal"] = len({one.rollout.prompt_id for one in self.scored if one.advantage}) * 1.0
        for outcome in self.outcomes:
            row |= outcome.metrics
        row |= self.stream | self.lossless | self.history | self.learned | self.saved
        for role, swap in self.swaps.items():
            row |= {f"{role}/swap_s": swap.seconds, f"{role}/swap_bytes": swap.num_bytes}
        row |= {"versions/policy": self.served.policy, "versions/drafter": self.served.drafter}
        row |= {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        span, step_s = batch.seconds if lags else self.seconds["step"], self.seconds["step"]
        busy = {"policy": self.seconds.get("update", 0.0) / step_s}
        for engine in range(num_engines if batch.seconds else 0):  # unknown in an empty window
            totals = self.engine_steps.get(engine, ())
            busy[f"rollout_{engine}"] = sum(total.seconds for total in totals) / span
        if config.drafter is not None:
            busy["drafter"] = (row.get("drafter/train_s", 0.0) + row.get("drafter/score_s", 0.0)) / step_s
        return row | {f"idle/{role}": max(0.0, 1 - share) for role, share in busy.items()}
