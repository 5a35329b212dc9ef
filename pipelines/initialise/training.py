"""Training of a drafter on recorded rollouts by a run's own trainer, with an evaluation on the hold-out after each epoch."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil

from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.console import Console
from cotrain.run.run_dir import RunDir
from cotrain.trainer.distiller import EXPECTED
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord
from pipelines.initialise.sources import Split, StoredRollout

Features = Callable[[Sequence[StoredRollout]], Awaitable[list[FeatureRecord]]]
"""Computes one record for each rollout, in order; fewer when the user has asked to stop."""


@dataclass(frozen=True)
class RunRecord:
    """Where training writes its records, and the state that it continues from."""

    config: RunConfig
    run_dir: RunDir
    state: RunState
    console: Console
    log: Callable[[int, Mapping[str, float]], None]
    """Takes a step and its metrics."""
    stop_requested: Callable[[], bool]


@dataclass(frozen=True)
class Progress:
    """Where training stands after an epoch; a checkpoint holds it beside the trainer's own state."""

    epoch: int
    best: dict[str, float]
    """Metrics of the best evaluation so far, whose drafter is in the run folder."""
    best_epoch: int
    """0 before training."""


def updates_of(rollouts: Sequence[StoredRollout], batch_tokens: int) -> int:
    """Optimizer steps that train on each of the rollouts once."""
    return ceil(sum(rollout.num_tokens for rollout in rollouts) / batch_tokens)


def windows_of(rollouts: Sequence[StoredRollout], tokens: float) -> list[list[StoredRollout]]:
    """Split the rollouts into parts of at most so many tokens, in order; a longer rollout is a part by itself."""
    windows, left = list[list[StoredRollout]](), 0.0
    for rollout in rollouts:
        if not windows or rollout.num_tokens > left:
            windows, left = [*windows, []], tokens
        windows[-1].append(rollout)
        left -= rollout.num_tokens
    return windows


class Training:
    """Trains one drafter for init.epochs epochs, and keeps the best one in the run folder.

    A step is at most drafter.updates_per_step updates. All rollouts of a window have their features in memory.
    """

    def __init__(self, run: RunRecord, trainer: DrafterTrainer, split: Split, features: Features) -> None:
        """The trainer must have its target weights. Training continues after the last epoch of `run.state`."""
        self.run, self.trainer, self.split, self.features = run, trainer, split, features
        self.best_folder = run.run_dir.path / "drafter"
        self.step, self.progress = (
            run.state.step,
            None if run.state.task_position is None else Progress(**run.state.task_position),
        )
        self._held: list[StoredRollout] | None = None  # the window that the trainer has the features of
        if self.progress is not None:
            self.trainer.load(run.run_dir.checkpoint(self.step) / "trainer")

    async def train(self) -> Progress | None:
        """Train, then load the best weights into the drafter. Returns None when asked to stop early; whole epochs are saved."""
        (rollouts, holdout), config = self.split, self.run.config
        if self.progress is None or self.progress.epoch < config.init.epochs:
            records = await self.features(holdout)
            if self.run.stop_requested():
                return None
            num_bytes, num_tokens = (sum(getattr(r, what) for r in records) for what in ("num_bytes", "num_tokens"))
            windows = windows_of(rollouts, (config.rollout.features.max_bytes - num_bytes) / num_bytes * num_tokens)
            if self.progress is None:
                await self._hold(windows[0])  # these rollouts also choose the vocabulary
                self._evaluate(0, records)
            else:
                self._held = windows[-1]
        while self.progress is not None and self.progress.epoch < config.init.epochs:
            row = await self._epoch(windows)
            if row is None:
                return None
            self.run.log(self.step, row | self._evaluate(self.progress.epoch + 1, records))
            state = replace(self.run.state, step=self.step, task_position=asdict(self.progress))
            with new_checkpoint(self.run.run_dir, state, keep_last=1) as folder:
                self.trainer.save(folder / "trainer")
        if self.progress is not None:
            self.trainer.drafter.load(self.best_folder)
        return self.progress

    async def _epoch(self, windows: list[list[StoredRollout]]) -> dict[str, float] | None:
        """Train on all rollouts once. Returns the metrics of the last step, which is not logged yet; None when asked to stop."""
        drafter, epochs = self.run.config.drafter, self.run.config.init.epochs
        assert drafter is not None and self.progress is not None
        plan = [updates_of(window, drafter.batch_tokens) for window in windows]
        steps = epochs * sum(ceil(updates / drafter.updates_per_step) for updates in plan)
        row: dict[str, float] = {}
        for window, updates in zip(windows, plan, strict=True):
            await self._hold(window)
            for first in range(0, updates, drafter.updates_per_step):
                if self.run.stop_requested():
                    return None
                if row:
                    self.run.log(self.step, row)
                started, self.step = time.perf_counter(), self.step + 1
                row = self.trainer.train(self.step, min(drafter.updates_per_step, updates - first))
                row |= {"time/step_s": time.perf_counter() - started}
                notes = [f"epoch {self.progress.epoch + 1}/{epochs}", f"loss {row['drafter/loss']:.3f}"]
                self.run.console.step(self.step, steps, row, Versions(0, 0), notes)
        return row

    async def _hold(self, window: list[StoredRollout]) -> None:
        """Give the trainer the features of a window, unless it has them."""
        if self._held is not window:
            self.trainer.add_features(await self.features(window))
            self._held = window

    def _evaluate(self, epoch: int, holdout: Sequence[FeatureRecord]) -> dict[str, float]:
        """Evaluate on the hold-out, and keep the drafter if it is the best. Epoch 0 is before training."""
        evaluated, before = self.trainer.evaluate(holdout), self.progress
        if EXPECTED not in evaluated:
            raise ValueError("init.holdout: no held-out rollout is long enough to evaluate on; raise init.tokens")
        when = f"after epoch {epoch}" if epoch else "before training"
        self.run.console.say(f"{when}: expected acceptance length {evaluated[EXPECTED]:.3f}")
        if before is None or evaluated[EXPECTED] > before.best[EXPECTED]:
            self.progress = Progress(epoch, evaluated, epoch)
            self.trainer.drafter.save(self.best_folder, self.trainer.serving_dtype)
        else:
            self.progress = replace(before, epoch=epoch)
        return evaluated
