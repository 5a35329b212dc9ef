"""What the engines generate and measure between two windows: without lag a window is a step, with lag it ends with one."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from cotrain.acceptance_stats import total_counts
from cotrain.engine.engine import RolloutEngine
from cotrain.loop.roles import Roles
from cotrain.process.failures import RunFailure
from cotrain.records import GainReport, Rollout, RolloutBatch, StepTotal
from cotrain.transport.nodes import Coming


@dataclass(frozen=True)
class StepWindow:
    """What the engines have generated and measured since the last window; with lag, nothing where no group has ended since."""

    batch: RolloutBatch = field(default_factory=lambda: RolloutBatch([], [], None, 0.0, 0))
    engine_steps: dict[int, list[StepTotal]] = field(default_factory=dict)  # by engine

    def busy_seconds(self, num_engines: int) -> list[float]:
        """Seconds that each engine computed; empty if the window is."""
        if not self.batch.seconds:
            return []
        return [sum(total.seconds for total in self.engine_steps.get(i, ())) for i in range(num_engines)]


class Windows:
    """Collects the batches of finished groups until a window takes them."""

    def __init__(self, roles: Roles, lags: bool, lost_features: int = 0):
        """lags: whether generation runs ahead of learning. lost_features: rollouts whose hidden states were lost before."""
        self._roles, self._lags = roles, lags
        self.lost_features = lost_features
        self._batches: list[tuple[tuple[int, int], RolloutBatch]] = []
        self._began, self._waited = time.perf_counter(), 0.0

    def add(self, engine: int, batch: RolloutBatch, place: int = 0) -> None:
        """Add what an engine has generated for a group. place: of the group among those that entered the engine together.

        A window has its batches by engine and place, so that without lag their order is always the same.
        """
        self._batches.append(((engine, place), batch))

    def waited(self, seconds: float) -> None:
        """Count seconds in which the learner waited for rollouts."""
        self._waited += seconds

    def take(self, rollouts: list[Rollout]) -> StepWindow:
        """End the window. rollouts: those of the step, which are the window's own without lag.

        With lag and no group that has ended, what the engines measure and the time count in the next window. Hidden states are
        brought to the trainer's node; where a node is gone, its rollouts count as lost features.
        """
        if not self._batches:
            return StepWindow()
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
        return StepWindow(batch, {engine: window.steps for engine, window in seen.items()})

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
    stats: Counter[str] = Counter()
    for batch in batches:
        stats.update(batch.feature_stats)
    return RolloutBatch(
        rollouts=[rollout for batch in batches for rollout in batch.rollouts],
        features=[shard for batch in batches for shard in batch.features],
        speculation=total_counts(batch.speculation for batch in batches),
        seconds=max(batch.seconds for batch in batches),
        num_generated_tokens=sum(batch.num_generated_tokens for batch in batches),
        feature_stats=dict(stats),
    )
