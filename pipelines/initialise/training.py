"""Training of a drafter on recorded rollouts: planned updates, evaluation on the hold-out, early stopping, saving."""

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, groupby
from math import ceil

from cotrain.config.schema import RunConfig
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.console import duration
from cotrain.run.run_dir import RunDir
from cotrain.trainer.buffer import pack
from cotrain.trainer.distiller import EXPECTED, Distiller
from cotrain.transport.features import FeatureRecord
from pipelines.initialise.sources import Split, StoredRollout

EVALUATIONS_PER_EPOCH = 2
PATIENCE = 2
"""Training stops after this many evaluations without a new best. On 200,000 tokens the last of 3 epochs is still the best."""
SECONDS_BETWEEN_LINES = 15.0

Features = Callable[[Sequence[StoredRollout]], Awaitable[list[FeatureRecord]]]
"""Computes one record for each rollout, in order; fewer when the user has asked to stop."""


@dataclass(frozen=True)
class RunRecord:
    """Where training writes its records, and the state that it continues from."""

    config: RunConfig
    run_dir: RunDir
    state: RunState
    say: Callable[[str], None]
    log: Callable[[int, Mapping[str, float]], None]
    """Takes the update after which an evaluation was made, and the metrics of that evaluation."""
    stop_requested: Callable[[], bool]


def plan_updates(config: RunConfig, lengths: Sequence[int]) -> list[list[int]]:
    """The indices of each update's rollouts, as a pure function of their lengths [tokens], the batch size and the seed.

    So interrupted training continues with the very next update, and the learning-rate schedule knows how many there are.
    Each epoch has its own order of the rollouts and batches of about the same size, so that none is a small remainder.
    """
    assert config.drafter is not None
    plan = []
    for epoch in range(config.init.epochs):
        order = random.Random(f"{config.seed}/{epoch}").sample(range(len(lengths)), len(lengths))
        ends = dict(zip(order, accumulate(lengths[i] for i in order), strict=True))
        total = ends[order[-1]]
        count = ceil(total / config.drafter.batch_tokens)
        plan += [list(batch) for _, batch in groupby(order, key=lambda i: (ends[i] - 1) * count // total)]
    return plan


@dataclass
class Progress:
    """Where training stands; a checkpoint holds it beside the trainer's own state."""

    update: int = 0
    best: dict[str, float] = field(default_factory=dict)
    """Metrics of the best evaluation so far, whose drafter is in the run folder."""
    best_update: int = 0


class Training:
    """Trains one drafter to the end of its plan, or until the hold-out no longer improves."""

    def __init__(
        self, run: RunRecord, trainer: Distiller, plan: Sequence[list[int]], split: Split, features: Features
    ) -> None:
        """The trainer must have its target weights and vocabulary. Training continues from `run.state` if that holds any."""
        self.run, self.trainer, self.plan, self.split, self.features = run, trainer, plan, split, features
        evaluations = run.config.init.epochs * EVALUATIONS_PER_EPOCH
        self.evaluate_after = {ceil(len(plan) * i / evaluations) for i in range(1, evaluations + 1)}
        self.best_folder = run.run_dir.path / "drafter"
        self.progress = Progress()
        self._holdout: list[FeatureRecord] = []
        self._loaded: dict[int, FeatureRecord] = {}
        self._since_evaluation: list[dict[str, float]] = []
        if run.state.task_position is not None:
            self.progress = Progress(**run.state.task_position)
            self.trainer.load(run.run_dir.checkpoint(self.progress.update) / "trainer")
        self._tokens, self._seconds, self._last_line = 0.0, 0.0, time.monotonic()
        self._first_update = self.progress.update

    @property
    def finished(self) -> bool:
        """Whether the plan is done, or the last PATIENCE evaluations brought no new best."""
        since_best = [u for u in self.evaluate_after if self.progress.best_update < u <= self.progress.update]
        return self.progress.update == len(self.plan) or len(since_best) >= PATIENCE

    async def train(self) -> bool:
        """Train, then load the best weights into the drafter. When asked to stop early, save and return False instead."""
        if not self.finished:
            self._holdout = await self.features(self.split[1])
        if not self.progress.best and not self.run.stop_requested():
            self._evaluate()
        while not self.finished:
            batch = self.plan[self.progress.update]
            if not self.run.stop_requested() and not self._loaded.keys() >= set(batch):
                await self._load_features()
            if self.run.stop_requested():
                self._save()
                return False
            self._update([self._loaded[i] for i in batch])
        self.trainer.drafter.load(self.best_folder)
        return True

    async def _load_features(self) -> None:
        """Compute features for the next updates: as many as features.max_bytes holds beside the hold-out, for one at least."""
        held_out = sum(record.num_bytes for record in self._holdout)
        bytes_per_token = held_out / sum(record.num_tokens for record in self._holdout)
        space = (self.run.config.rollout.features.max_bytes - held_out) / bytes_per_token
        wanted: dict[int, StoredRollout] = {}
        num_tokens = 0
        for batch in self.plan[self.progress.update :]:
            more = {i: self.split[0][i] for i in batch if i not in wanted}
            num_tokens += sum(rollout.num_tokens for rollout in more.values())
            if wanted and num_tokens > space:
                break
            wanted |= more
        self._loaded = {}  # memory may not hold the old and the new ones together
        self._loaded = dict(zip(wanted, await self.features(list(wanted.values())), strict=False))

    def _update(self, records: list[FeatureRecord]) -> None:
        started, progress = time.monotonic(), self.progress
        metrics = self.trainer.update(pack(records), progress.update + 1)
        progress.update += 1
        self._since_evaluation.append(metrics)
        self._tokens += metrics["num_tokens"]
        self._seconds += time.monotonic() - started
        if progress.update in self.evaluate_after:
            self._evaluate()
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._say_progress(metrics["loss"])

    def _evaluate(self) -> None:
        """Evaluate on the hold-out, keep the drafter if it is the best, log and save."""
        evaluated = self.trainer.evaluate(self._holdout)
        if EXPECTED not in evaluated:
            raise ValueError("init.holdout: no held-out rollout is long enough to evaluate on; raise init.tokens")
        progress, updates, say = self.progress, self._since_evaluation, self.run.say
        if not progress.best or evaluated[EXPECTED] > progress.best[EXPECTED]:
            progress.best, progress.best_update = evaluated, progress.update
            self.trainer.drafter.save(self.best_folder, self.trainer.serving_dtype)
        if not updates:
            say(f"before training: expected acceptance length {evaluated[EXPECTED]:.3f}")
        else:
            row = {f"drafter/{name}": sum(u[name] for u in updates) / len(updates) for name in ("loss", "grad_norm")}
            self._say_progress(row["drafter/loss"], f"expected acceptance length {evaluated[EXPECTED]:.3f}")
            row |= {"drafter/learning_rate": updates[-1]["learning_rate"], "drafter/epoch": self._epoch}
            self.run.log(progress.update, evaluated | row)
            if self.finished and progress.update < len(self.plan):
                best = f"{progress.best[EXPECTED]:.3f} at update {progress.best_update}"
                say(f"stopping early: {PATIENCE} evaluations without a better one than {best}")
        self._since_evaluation = []
        self._save()

    @property
    def _epoch(self) -> int:
        """The epoch of the last update, from 1."""
        return ceil(self.progress.update * self.run.config.init.epochs / len(self.plan))

    def _say_progress(self, loss: float, *more: str) -> None:
        self._last_line = time.monotonic()
        update, total = self.progress.update, len(self.plan)
        seconds_left = (total - update) * self._seconds / (update - self._first_update)
        parts = [f"epoch {self._epoch}/{self.run.config.init.epochs}", f"update {update}/{total}", f"loss {loss:.3f}"]
        parts += [*more, f"{self._tokens / self._seconds:,.0f} tok/s", f"eta {duration(seconds_left, decimals=0)}"]
        self.run.say("  ".join(parts))

    def _save(self) -> None:
        run, progress = self.run, self.progress
        if not run.run_dir.checkpoint(progress.update).exists():
            state = replace(run.state, step=progress.update, task_position=asdict(progress))
            with new_checkpoint(run.run_dir, state, keep_last=1) as folder:
                self.trainer.save(folder / "trainer")
