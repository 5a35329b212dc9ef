"""Training of a drafter on recorded rollouts: planned updates, evaluation on the hold-out, early stopping, saving."""

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.checkpoint import RunState, latest_checkpoint, load_state, new_checkpoint
from cotrain.run.console import duration
from cotrain.run.run_dir import RunDir
from cotrain.trainer.buffer import pack
from cotrain.trainer.distiller import Distiller, vocabulary_counts
from cotrain.transport.features import FeatureRecord
from pipelines.initialise.rollouts import StoredRollout

EXPECTED = "drafter/expected_acceptance_length"
EVALUATIONS_PER_EPOCH = 2
PATIENCE = 2
"""Training stops after this many evaluations without a new best; on 200,000 tokens the best is the last of 3 epochs."""
SECONDS_BETWEEN_LINES = 15.0

Features = Callable[[Sequence[StoredRollout]], Awaitable[list[FeatureRecord] | None]]
"""Computes one record for each rollout, in order; None when the user asked to stop."""


@dataclass(frozen=True)
class RunRecord:
    """Where a training writes what it does."""

    config: RunConfig
    run_dir: RunDir
    fingerprints: dict[str, str]
    tracking_run_id: str | None
    say: Callable[[str], None]
    log: Callable[[int, Mapping[str, float]], None]
    """Takes the metrics of an evaluation, and the update after which it was made."""

    def new_checkpoint(self, progress: "Progress") -> AbstractContextManager[Path]:
        """The folder of the next checkpoint, which replaces the one before it when the context is left."""
        state = RunState(
            step=progress.update,
            versions=Versions(0, 0),
            task_position=asdict(progress),
            config=self.config.model_dump(mode="json"),
            fingerprints=self.fingerprints,
            tracking_run_id=self.tracking_run_id,
        )
        return new_checkpoint(self.run_dir, state, keep_last=1)


@dataclass(frozen=True)
class Update:
    """One optimizer step of the plan."""

    epoch: int
    chunk: range
    """Numbers of the rollouts whose features are in memory together."""
    rollouts: list[int]
    """Numbers of the rollouts that it trains on."""


def plan_updates(config: RunConfig, lengths: Sequence[int], bytes_per_token: int) -> list[Update]:
    """All updates, as a pure function of the rollouts' lengths [tokens], the bounds and the seed.

    So an interrupted training goes on with the very next update, and the schedule knows their number. Each epoch takes
    chunks of rollouts in random order, as large as rollout.features.max_bytes holds, and the rollouts of a chunk in
    random order. Raises ValueError naming that field when it does not hold one rollout.
    """
    assert config.drafter is not None
    bound = config.rollout.features.max_bytes
    max_tokens = int((1 - config.init.holdout) * bound) // bytes_per_token
    if max(lengths) > max_tokens:
        raise ValueError(
            f"rollout.features.max_bytes: {bound} does not hold the features of one rollout of {max(lengths)} tokens, "
            f"{bytes_per_token} bytes each; raise it"
        )
    chunks = _chunks(lengths, max_tokens)
    updates = []
    for epoch in range(config.init.epochs):
        rng = random.Random(f"{config.seed}/{epoch}")
        for chunk in rng.sample(chunks, len(chunks)):
            rollouts = rng.sample(chunk, len(chunk))
            updates += [
                Update(epoch, chunk, batch) for batch in _batches(rollouts, lengths, config.drafter.batch_tokens)
            ]
    return updates


def _chunks(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Consecutive rollouts of at most max_tokens together."""
    chunks, begin, tokens = [], 0, 0
    for number, length in enumerate(lengths):
        if tokens + length > max_tokens:
            chunks.append(range(begin, number))
            begin, tokens = number, 0
        tokens += length
    return [*chunks, range(begin, len(lengths))]


def _batches(rollouts: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of even size, about batch_tokens at most, so that none is a small remainder."""
    ends = list(accumulate(lengths[i] for i in rollouts))
    count = ceil(ends[-1] / batch_tokens)
    numbered = zip(((end - 1) * count // ends[-1] for end in ends), rollouts, strict=True)
    return [[rollout for _, rollout in group] for _, group in groupby(numbered, key=lambda pair: pair[0])]


@dataclass
class Progress:
    """Where training stands; a checkpoint holds it beside the trainer's own state."""

    update: int = 0
    best: dict[str, float] = field(default_factory=dict)
    """Metrics of the best evaluation so far."""
    best_update: int = 0
    without_best: int = 0
    """Evaluations since the best one."""
    finished: bool = False
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the metrics of the updates since the last evaluation, and their number."""


class Training:
    """Trains one drafter to the end of its plan, or until the hold-out no longer improves."""

    def __init__(
        self,
        run: RunRecord,
        trainer: Distiller,
        plan: Sequence[Update],
        rollouts: Sequence[StoredRollout],
        features: Features,
        holdout: list[FeatureRecord],
    ) -> None:
        """The trainer has its target weights and vocabulary. Continues from the run's newest checkpoint, if any."""
        self.run, self.trainer, self.plan = run, trainer, plan
        self.rollouts, self.features, self.holdout = rollouts, features, holdout
        self.progress = Progress()
        last = {epoch: number for number, epoch in enumerate((u.epoch for u in plan), start=1)}
        first = {epoch: number - sum(u.epoch == epoch for u in plan) for epoch, number in last.items()}
        self.evaluate_after = {
            max(first[e] + 1, round(first[e] + (last[e] - first[e]) * part / EVALUATIONS_PER_EPOCH))
            for e in last
            for part in range(1, EVALUATIONS_PER_EPOCH + 1)
        }
        self._best: dict[str, Tensor] = {}
        self._saved_update = -1
        self._started = self._last_line = time.monotonic()
        self._tokens = 0
        if (checkpoint := latest_checkpoint(run.run_dir)) is not None:
            self.progress = Progress(**load_state(checkpoint).task_position)
            self.trainer.drafter.load(checkpoint / "best")
            self._best = self._weights()
            self.trainer.load_without_features(checkpoint / "trainer")
            self._saved_update = self.progress.update
        self._first_update = self.progress.update

    async def train(self, stop_requested: Callable[[], bool]) -> bool:
        """Train. Returns False when it was asked to stop early; the state is saved either way."""
        if not self.progress.best:
            self._evaluate()
        loaded, records = range(0), list[FeatureRecord]()
        for update in self.plan[self.progress.update :]:
            if self.progress.finished:
                break
            if update.chunk != loaded:
                records = []  # two chunks would not fit into memory
                computed = await self.features([self.rollouts[i] for i in update.chunk])
                loaded, records = update.chunk, computed or []
                if self.progress.update == self._first_update:
                    self._started = time.monotonic()  # the first features would spoil rate and ETA
            if stop_requested() or not records:
                self._save()
                return False
            self._train_on([records[i - loaded.start] for i in update.rollouts], update.epoch)
        return True

    def use_best(self) -> None:
        """Give the drafter the best weights seen."""
        self.trainer.drafter.load_state_dict(self._best)

    def _train_on(self, records: list[FeatureRecord], epoch: int) -> None:
        progress = self.progress
        metrics = self.trainer.update(pack(records), progress.update + 1)
        progress.update += 1
        self._tokens += sum(record.num_tokens for record in records)
        for name, value in {"updates": 1.0, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}.items():
            progress.sums[name] = progress.sums.get(name, 0.0) + value
        if progress.update in self.evaluate_after:
            self._evaluate(metrics["learning_rate"], epoch)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._line(epoch, metrics["loss"])

    def _evaluate(self, learning_rate: float = 0.0, epoch: int = 0) -> None:
        """Evaluate on the hold-out, keep the weights if they are the best, decide whether to go on, save."""
        evaluated = self.trainer.evaluate(self.holdout)
        if EXPECTED not in evaluated:
            raise ValueError("init.holdout: no held-out rollout is long enough to evaluate on; raise init.tokens")
        progress, sums = self.progress, self.progress.sums
        if progress.update:
            row = evaluated | {f"drafter/{name}": sums[name] / sums["updates"] for name in ("loss", "grad_norm")}
            self._line(epoch, row["drafter/loss"], evaluated[EXPECTED])
            self.run.log(progress.update, row | {"drafter/learning_rate": learning_rate, "drafter/epoch": epoch + 1})
        else:
            self.run.say(f"before training: expected acceptance length {evaluated[EXPECTED]:.3f}")
        if not progress.best or evaluated[EXPECTED] > progress.best[EXPECTED]:
            progress.best, progress.best_update, progress.without_best = evaluated, progress.update, 0
            self._best = self._weights()
        else:
            progress.without_best += 1
        if progress.without_best >= PATIENCE and progress.update < len(self.plan):
            self.run.say(
                f"stopping early: {PATIENCE} evaluations without a better one than {progress.best[EXPECTED]:.3f} at "
                f"update {progress.best_update}"
            )
            progress.finished = True
        progress.sums = {}
        self._save()

    def _line(self, epoch: int, loss: float, expected: float | None = None) -> None:
        self._last_line = time.monotonic()
        seconds = max(1e-9, self._last_line - self._started)
        update, total = self.progress.update, len(self.plan)
        parts = [f"epoch {epoch + 1}/{self.plan[-1].epoch + 1}", f"update {update}/{total}", f"loss {loss:.3f}"]
        if expected is not None:
            parts.append(f"expected acceptance length {expected:.3f}")
        eta = (total - update) * seconds / (update - self._first_update)
        parts += [f"{self._tokens / seconds:,.0f} tok/s", f"eta {duration(eta, decimals=0)}"]
        self.run.say("  ".join(parts))

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.drafter.state_dict().items()}

    def _save(self) -> None:
        if self.progress.update == self._saved_update:
            return
        with self.run.new_checkpoint(self.progress) as folder:
            self.trainer.save_without_features(folder / "trainer")
            current = self._weights()
            self.use_best()
            self.trainer.drafter.save(folder / "best", torch.float32)
            self.trainer.drafter.load_state_dict(current)
        self._saved_update = self.progress.update


def choose_vocabulary(trainer: Distiller, vocab_size: int, training: Sequence[StoredRollout]) -> None:
    """Choose the draft vocabulary from the training rollouts."""
    pairs = ((torch.tensor(r.prompt_token_ids), torch.tensor(r.token_ids)) for r in training)
    trainer.choose_vocabulary(vocabulary_counts(pairs, vocab_size), policy_version=0)


def vocabulary_coverage(trainer: Distiller, holdout: Sequence[StoredRollout]) -> float:
    """Share of the held-out response tokens in the draft vocabulary; others can never be drafted."""
    tokens = torch.tensor([token for rollout in holdout for token in rollout.token_ids])
    return float(torch.isin(tokens, trainer.drafter.draft_to_target.cpu()).double().mean())
