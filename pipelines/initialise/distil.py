"""Training a drafter on recorded rollouts: epochs in planned order, looks at the hold-out, early stopping, saving."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.checkpoint import RunState, latest_checkpoint, load_state, new_checkpoint
from cotrain.run.console import duration
from cotrain.run.run_dir import RunDir
from cotrain.trainer.buffer import pack
from cotrain.trainer.trainer import DrafterTrainer, vocabulary_counts
from cotrain.transport.features import FeatureRecord
from drafters.vocabulary import coverage
from pipelines.initialise.corpus import StoredRollout
from pipelines.initialise.epoch_plan import Mix, cut_segments, plan_epoch
from pipelines.initialise.feature_store import SEGMENT_ROLLOUTS, FeatureStore

EXPECTED = "drafter/expected_acceptance_length"
SECONDS_BETWEEN_LINES = 15.0
SEGMENTS_PER_MIX = 4
"""At least so many segments are in memory together, so that a batch never comes from one alone."""


@dataclass(frozen=True)
class TrainingPlan:
    """All updates before the first one."""

    segments: list[range]
    epochs: list[list[Mix]]
    looks: list[int]
    """Updates after which the hold-out is looked at, ascending."""

    @property
    def num_updates(self) -> int:
        """Of all epochs."""
        return sum(len(mix.batches) for epoch in self.epochs for mix in epoch)


def plan_training(config: RunConfig, rollouts: Sequence[StoredRollout], bytes_per_token: int) -> TrainingPlan:
    """Raises ValueError naming drafter.buffer.max_bytes when it does not hold one rollout."""
    assert config.drafter is not None
    lengths = [rollout.num_tokens for rollout in rollouts]
    bound = config.drafter.buffer.max_bytes
    max_tokens = int((1 - config.init.holdout) * bound) // bytes_per_token
    if max(lengths) > max_tokens:
        raise ValueError(
            f"drafter.buffer.max_bytes: {bound} does not hold the features of one rollout of {max(lengths)} tokens, "
            f"{bytes_per_token} bytes each; raise it"
        )
    segments = cut_segments(lengths, SEGMENT_ROLLOUTS, max(1, max_tokens // SEGMENTS_PER_MIX))
    epochs = [
        plan_epoch(lengths, segments, max_tokens, config.drafter.batch_tokens, config.seed, epoch)
        for epoch in range(config.init.epochs)
    ]
    looks: list[int] = []
    first = 0
    for epoch_plan in epochs:
        size = sum(len(mix.batches) for mix in epoch_plan)
        count = config.init.evaluations_per_epoch
        looks += [first + max(1, round(size * i / count)) for i in range(1, count + 1)]
        first += size
    return TrainingPlan(segments, epochs, sorted(set(looks)))


@dataclass
class Progress:
    """Where training stands; what a checkpoint holds beside the trainer's own state."""

    update: int = 0
    best: dict[str, float] = field(default_factory=dict)
    """Metrics of the best look so far."""
    best_update: int = 0
    looks_without_best: int = 0
    finished: bool = False
    since_look: dict[str, float] = field(default_factory=dict)
    """Sums over the updates since the last look."""

    @property
    def expected_length(self) -> float:
        """Of the best look."""
        return self.best[EXPECTED]


class Distillation:
    """Trains one drafter to the end of its plan, or until the hold-out no longer improves."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        trainer: DrafterTrainer,
        store: FeatureStore,
        rollouts: Sequence[StoredRollout],
        plan: TrainingPlan,
        fingerprints: dict[str, str],
        tracking_run_id: str,
    ) -> None:
        """rollouts are those trained on; the trainer has its target weights and vocabulary."""
        self.config, self.run_dir, self.trainer, self.store = config, run_dir, trainer, store
        self.rollouts, self.plan = rollouts, plan
        self.fingerprints, self.tracking_run_id = fingerprints, tracking_run_id
        self.holdout: Sequence[FeatureRecord] = ()
        self.progress = Progress()
        self.say: Callable[[str], None] = print
        self.on_look: Callable[[int, Mapping[str, float]], None] = lambda update, metrics: None
        self.stop_requested: Callable[[], bool] = lambda: False
        self._records: dict[int, FeatureRecord] = {}  # by number of the rollout
        self._best: dict[str, Tensor] = {}
        self._saved_update = -1
        self._started = self._last_line = time.monotonic()
        self._first_update = 0

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoint = latest_checkpoint(self.run_dir)
        if checkpoint is None:
            return
        self.progress = Progress(**load_state(checkpoint).task_position)
        self.trainer.drafter.load(checkpoint / "best")
        self._best = self._weights()
        self.trainer.load_without_features(checkpoint / "trainer")
        self._saved_update = self._first_update = self.progress.update

    async def run(self) -> bool:
        """Train. Returns False when it was asked to stop early; the state is saved either way."""
        if not self.progress.best:
            self._look()
        first = 0
        for number, mixes in enumerate(self.plan.epochs):
            for mix in mixes:
                begin, first = first, first + len(mix.batches)
                if self.progress.update >= first or self.progress.finished:
                    continue
                if not await self._load(mix):
                    return False
                if self.progress.update == self._first_update:  # the first features would spoil rate and ETA
                    self._started = time.monotonic()
                for batch in mix.batches[self.progress.update - begin :]:
                    if self.stop_requested():
                        self._save()
                        return False
                    self._update(batch, number)
                    if self.progress.finished:
                        return True
        return True

    def use_best(self) -> None:
        """Give the drafter the best weights seen."""
        self.trainer.drafter.load_state_dict(self._best)

    async def _load(self, mix: Mix) -> bool:
        """Features of a mix, keeping those in memory; False when asked to stop, with nothing to save."""
        wanted = {i for number in mix.segments for i in self.plan.segments[number]}
        self._records = {i: record for i, record in self._records.items() if i in wanted}
        for count, number in enumerate(mix.segments, start=1):
            segment = self.plan.segments[number]
            if segment[0] not in self._records:
                if self.stop_requested():
                    return False
                records = await self.store.load(f"training_{number:05d}", [self.rollouts[i] for i in segment])
                self._records |= zip(segment, records, strict=True)
                self.say(f"features {count}/{len(mix.segments)}  {sum(r.num_tokens for r in records):,} tokens")
        return True

    def _update(self, batch: list[int], epoch: int) -> None:
        metrics = self.trainer.update(pack([self._records[i] for i in batch]), self.progress.update + 1)
        self.progress.update += 1
        sums = self.progress.since_look
        for name in ("loss", "grad_norm", "num_tokens"):
            sums[name] = sums.get(name, 0.0) + metrics[name]
        sums["updates"] = sums.get("updates", 0) + 1
        if self.progress.update in self.plan.looks:
            self._look(metrics["learning_rate"], epoch)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._line(epoch, metrics["loss"])

    def _look(self, learning_rate: float | None = None, epoch: int = 0) -> None:
        """Evaluate on the hold-out, keep the weights if they are the best, decide whether to go on, save."""
        evaluated = self.trainer.evaluate(self.holdout)
        if EXPECTED not in evaluated:
            raise ValueError("init.holdout: no held-out rollout is long enough to evaluate on; raise init.tokens")
        progress, sums = self.progress, self.progress.since_look
        if progress.update:
            count = sums["updates"]
            row = evaluated | {f"drafter/{name}": sums[name] / count for name in ("loss", "grad_norm")}
            row |= {"drafter/learning_rate": learning_rate or 0.0, "drafter/epoch": epoch + 1}
            self._line(epoch, row["drafter/loss"], evaluated[EXPECTED])
            self.on_look(progress.update, row)
        else:
            self.say(f"before training: expected acceptance length {evaluated[EXPECTED]:.3f}")
        if not progress.best or evaluated[EXPECTED] > progress.expected_length:
            progress.best, progress.best_update, progress.looks_without_best = evaluated, progress.update, 0
            self._best = self._weights()
        else:
            progress.looks_without_best += 1
            if progress.looks_without_best >= self.config.init.patience:
                progress.finished = True
                self.say(
                    f"stopping early: {progress.looks_without_best} looks without a better one than "
                    f"{progress.expected_length:.3f} at update {progress.best_update} (init.patience)"
                )
        progress.finished |= progress.update == self.plan.num_updates
        progress.since_look = {}
        self._save()

    def _line(self, epoch: int, loss: float, expected: float | None = None) -> None:
        self._last_line = time.monotonic()
        done = self.progress.update - self._first_update
        seconds = max(1e-9, self._last_line - self._started)
        total = self.plan.num_updates
        parts = [f"epoch {epoch + 1}/{len(self.plan.epochs)}", f"update {self.progress.update}/{total}"]
        parts.append(f"loss {loss:.3f}")
        if expected is not None:
            parts.append(f"expected acceptance length {expected:.3f}")
        parts.append(f"{self._tokens_done() / seconds:,.0f} tok/s")
        parts.append(f"eta {duration((total - self.progress.update) * seconds / done, decimals=0)}")
        self.say("  ".join(parts))

    def _tokens_done(self) -> int:
        """Trained on in this attempt."""
        batches = [batch for mixes in self.plan.epochs for mix in mixes for batch in mix.batches]
        return sum(self.rollouts[i].num_tokens for b in batches[self._first_update : self.progress.update] for i in b)

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.drafter.state_dict().items()}

    def _save(self) -> None:
        if self.progress.update == self._saved_update:
            return
        state = RunState(
            step=self.progress.update,
            versions=Versions(0, 0),
            task_position=asdict(self.progress),
            config=self.config.model_dump(mode="json"),
            fingerprints=self.fingerprints,
            tracking_run_id=self.tracking_run_id,
        )
        with new_checkpoint(self.run_dir, state, keep_last=1) as folder:
            self.trainer.save_without_features(folder / "trainer")
            current = self._weights()
            self.use_best()
            self.trainer.drafter.save(folder / "best", torch.float32)
            self.trainer.drafter.load_state_dict(current)
        self._saved_update = self.progress.update


def choose_vocabulary(
    trainer: DrafterTrainer,
    vocab_size: int,
    training: Sequence[StoredRollout],
    holdout: Sequence[StoredRollout],
    keep: bool,
) -> float:
    """Choose the draft vocabulary from the training rollouts (keep: leave it as it is). Coverage of the hold-out."""
    if not keep:
        pairs = ((torch.tensor(r.prompt_token_ids), torch.tensor(r.token_ids)) for r in training)
        trainer.choose_vocabulary(vocabulary_counts(pairs, vocab_size), policy_version=0)
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for rollout in holdout:
        counts += torch.tensor(rollout.token_ids).bincount(minlength=vocab_size)
    return coverage(counts, trainer.drafter.draft_to_target.cpu())
