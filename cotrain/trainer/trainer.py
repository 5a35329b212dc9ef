"""The drafter trainer: takes in rollout features, trains the drafter on them, scores it on prompts it never trained on.

It shares no weight, optimizer or random state with the policy learner. All random choices come from its own generator,
so that a run that is saved and loaded continues bit for bit.
"""

import copy
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from cotrain.config.schema import DrafterConfig, RolloutConfig
from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.process.failures import RunFailure
from cotrain.records import FeatureShard
from cotrain.trainer.buffer import FeatureBuffer, batches_of, split_holdout, spread_over_prompts
from cotrain.trainer.host_memory import return_freed_blocks
from cotrain.trainer.schedule import num_updates
from cotrain.trainer.target_weights import load_target_weights, read_target_weights, save_target_weights
from cotrain.transport.features import FeatureRecord, read_shard
from drafters.acceptance import RolloutAcceptance, StartAcceptance, acceptance_rates, rollout_acceptances
from drafters.alignment import DraftBatch
from drafters.base import Drafter, DraftLoss, Sampler, TargetSpec, TargetWeights
from drafters.build import build_drafter, load_drafter
from drafters.losses import acceptances

PROMPT_TOKEN_WEIGHT = 0.1
"""What a prompt token counts when the draft vocabulary is chosen: only response tokens are ever drafted, but the words
of a prompt tend to come back in its response."""

TRAINER_STATE, TARGET_WEIGHTS, SERVED = "trainer.pt", "target_weights.safetensors", "served"


class TrainingDiverged(RunFailure, FloatingPointError):
    """A loss, gradient or weight of the drafter is not finite."""


@dataclass(frozen=True)
class FreshScores:
    """Expected acceptance on a step's rollouts, before any drafter was trained on them."""

    prompts: list[str]
    """[R] which prompt each rollout is of."""
    serving: list[RolloutAcceptance]
    """[K] of the served drafter at draft lengths 1 to K."""
    candidate: list[RolloutAcceptance] | None
    """[K] of the trainer's weights; None while they are those of the last publication."""
    sessions: int
    """Calls of `train` since that publication."""


class DrafterTrainer:
    """Trains one drafter in float32 on features of the current policy, and keeps the published ones."""

    def __init__(
        self,
        config: DrafterConfig,
        rollout: RolloutConfig,
        model_path: str,
        init_folder: str | None,
        total_steps: int,
        seed: int,
        device: str = "cpu",
    ):
        """Build the drafter, or load it from init_folder.

        model_path is the target's folder; only its config.json is read. total_steps is that of the run and sets the
        length of a cosine schedule. Raises ValueError when drafter, target and configuration do not fit each other.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device is {device!r}; use 'cpu' or 'cuda'")
        if device == "cpu":
            return_freed_blocks()
        self._config, self._rollout, self._seed, self._device = config, rollout, seed, device
        self._target = TargetSpec.from_pretrained(model_path)
        if init_folder is None:
            drafter = build_drafter(config.model, self._target, seed)
        else:
            drafter = load_drafter(init_folder, self._target, rollout.num_positions, config.model)
        self.drafter: Drafter = drafter.to(device)
        self._drafter_version = 0
        self._sessions = 0  # since the last publication
        self._published: dict[int, Drafter] = {0: self._frozen_copy()}
        self._fresh: list[FeatureRecord] = []
        self._needs_vocabulary = init_folder is None and config.train
        self._sampler = Sampler(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self._optimizer, self._scheduler = build_optimizer(
            self.drafter.parameters(), config.optimizer, num_updates(config, total_steps)
        )
        self._rng = torch.Generator().manual_seed(seed)
        max_bytes = (config.buffer.max_age + 1) * rollout.num_engines * rollout.features.max_bytes
        holdout_bytes = int(config.holdout * max_bytes)
        self._buffer = FeatureBuffer(max_bytes - holdout_bytes, config.buffer.max_age)
        self._holdout = FeatureBuffer(holdout_bytes, max_age=0)
        self._target_weights: dict[int, TargetWeights] = {}
        self._newest_features = -1  # newest policy version whose features were seen

    @property
    def drafter_version(self) -> int:
        """Publications so far."""
        return self._drafter_version

    def set_target_weights(self, payload_path: str, policy_version: int) -> None:
        """Take embedding and head of a policy version from a safetensors file in Hugging Face names.

        Must come before the features of that version. Versions that no held feature needs are forgotten.
        """
        weights = read_target_weights(payload_path, policy_version, self._target, self._device)
        self._target_weights[policy_version] = weights
        self._forget_target_weights()

    def add_features(self, shards: list[FeatureShard]) -> dict[str, float]:
        """Read and delete the shards' files and keep their rollouts, some of the prompts apart as the hold-out.

        The first features of a new drafter also choose its draft vocabulary (drafter/vocabulary_coverage: share of
        the counted tokens in it). Raises ValueError listing every shard that is broken, or is not of a policy version,
        sampler and aux layers trained on; their files stay, and the other shards are taken in first.
        """
        records: list[FeatureRecord] = []
        problems: list[str] = []
        for shard in shards:
            try:
                records += self._read(shard)
            except ValueError as error:
                problems.append(str(error))
        self._fresh = [record for record in records if record.is_trainable]
        metrics = self._take_in(records)
        if problems:
            raise ValueError("features that cannot be trained on: " + "; ".join(problems))
        return metrics | self._buffer_metrics()

    @torch.no_grad()
    def score_fresh(self, serving: int, keep: Collection[int]) -> FreshScores:
        """Both drafters on rollouts of the last `add_features`, gate.max_rollouts at most, for the draft tokens served.

        Call it before `train`: a rollout tests a drafter once, and trains it from then on. serving: the version that
        the engines have; other publications than that and `keep` are forgotten.
        """
        self._published = {v: drafter for v, drafter in self._published.items() if v in {serving, *keep}}
        scored = spread_over_prompts(self._fresh, self._config.gate.max_rollouts)
        batches = batches_of(scored, self._config.batch_tokens)
        served = min(self._rollout.draft_tokens, self.drafter.trained_depth)

        drafters = [self._published[serving], *([self.drafter] if self._sessions else [])]
        parts = [self._acceptances(batch, drafters) for batch in batches]
        served_one, *candidate = (
            rollout_acceptances([part[index] for part in parts], served) for index in range(len(drafters))
        )
        return FreshScores(
            prompts=[record.prompt_key for record in scored],
            serving=served_one,
            candidate=candidate[0] if candidate else None,
            sessions=self._sessions,
        )

    def train(self, step: int) -> dict[str, float]:
        """updates_per_step optimizer steps on the buffer, then `evaluate`.

        Loss (weighted, and per draft position), grad_norm (before clipping) and lag_versions (newest policy version
        seen minus the one trained on) are means over the updates. Raises ValueError when there is nothing to train
        on, FloatingPointError before the optimizer moves when a loss or gradient is not finite.
        """
        if not len(self._buffer):
            raise ValueError(
                f"step {step}: no features to train the drafter on: every rollout was dropped or has only holes; "
                "raise rollout.features.max_bytes"
            )
        started = time.perf_counter()
        updates = [self._update(step) for _ in range(self._config.updates_per_step)]
        seconds = time.perf_counter() - started
        self._sessions += 1
        num_tokens = sum(update.pop("num_tokens") for update in updates)
        metrics = {f"drafter/{name}": sum(u[name] for u in updates) / len(updates) for name in updates[0]}
        metrics["drafter/learning_rate"] = updates[-1]["learning_rate"]
        metrics["drafter/tokens_per_s"] = num_tokens / seconds
        metrics["drafter/train_s"] = seconds
        return metrics | self._buffer_metrics() | self.evaluate()

    def choose_vocabulary(self, token_counts: Tensor, policy_version: int) -> float:
        """Pick the draft vocabulary from counts [V], before the first update; the share of them that it covers."""
        self._needs_vocabulary = False
        return self.drafter.choose_vocabulary(token_counts, self._target_weights[policy_version])

    def hold_out(self, records: list[FeatureRecord]) -> int:
        """Evaluate on these rollouts too. Returns how many rollouts the hold-out has now, within its bound."""
        self._holdout.add(records)
        return len(self._holdout)

    @torch.no_grad()
    def evaluate(self, records: list[FeatureRecord] | None = None) -> dict[str, float]:
        """Expected acceptance of the current weights on these rollouts; empty without any.

        As the engine would count it on these rollouts: rate of position k = share of verification steps that accept
        draft tokens 1 to k, length = 1 + sum of the rates, for the draft tokens served (see drafters/acceptance.py).
        """
        served = min(self._rollout.draft_tokens, self.drafter.trained_depth)
        batches = batches_of(self._holdout.records if records is None else records, self._config.batch_tokens)
        rates = acceptance_rates([self._loss(batch).acceptance for batch in batches], served)
        if not rates:
            return {}
        metrics = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
        return metrics | {"drafter/expected_acceptance_length": 1.0 + sum(rates)}

    def publish(self, weights_of: int | None = None) -> int:
        """Give the current weights, or those of an earlier publication, the next drafter version.

        Raises TrainingDiverged when a current weight is not finite, or so large that an engine's numbers would not be.
        """
        version = self._drafter_version + 1
        if weights_of is not None:
            self._published[version] = self._published[weights_of]
        else:
            if broken := self._non_finite_parameters():
                raise TrainingDiverged(f"drafter version {version} is not published: {broken}")
            if too_large := self.drafter.overflowing():
                raise TrainingDiverged(
                    f"drafter version {version} is not published, an engine would compute {'; '.join(too_large)}: lower "
                    "drafter.optimizer.learning_rate"
                )
            self._published[version] = self._frozen_copy()
            self._sessions = 0
        self._drafter_version = version
        return version

    def state_for_serving(self, version: int | None = None) -> dict[str, Tensor]:
        """Exactly the tensors an engine loads, in checkpoint names; of a publication, or of the current weights."""
        return self._weights(version).state_for_serving()

    def save_checkpoint(self, folder: str | Path, dtype: torch.dtype, version: int | None = None) -> None:
        """Write the folder that stock vLLM serves; of a publication, or of the current weights."""
        self._weights(version).save(folder, dtype)

    def _weights(self, version: int | None) -> Drafter:
        return self.drafter if version is None else self._published[version]

    def _frozen_copy(self) -> Drafter:
        return copy.deepcopy(self.drafter).requires_grad_(False)

    def save(self, folder: str | Path) -> None:
        """Write everything an exact continuation needs: drafters in float32, optimizer, buffers, target weights."""
        folder = Path(folder)
        self.save_without_features(folder)
        for version, drafter in self._published.items():
            drafter.save(folder / SERVED / str(version), torch.float32)
        self._buffer.save(folder / "buffer")
        self._holdout.save(folder / "holdout")
        save_target_weights(self._target_weights, folder / TARGET_WEIGHTS)

    def save_without_features(self, folder: str | Path) -> None:
        """`save` for somebody who can hand over features and target weights again."""
        folder = Path(folder)
        self.drafter.save(folder, torch.float32)
        state = {
            "drafter_version": self._drafter_version,
            "sessions": self._sessions,
            "newest_features": self._newest_features,
            "needs_vocabulary": self._needs_vocabulary,
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "rng": self._rng.get_state(),
        }
        torch.save(state, folder / TRAINER_STATE)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by `save`. Raises ValueError when its drafter does not fit this one."""
        folder = Path(folder)
        self.load_without_features(folder)
        self._published = {}
        for saved in (folder / SERVED).iterdir():
            drafter = self._frozen_copy()
            drafter.load(saved)
            self._published[int(saved.name)] = drafter
        self._buffer.load(folder / "buffer")
        self._holdout.load(folder / "holdout")
        self._target_weights = load_target_weights(folder / TARGET_WEIGHTS, self._device)

    def load_without_features(self, folder: str | Path) -> None:
        """Continue from a folder written by `save_without_features`."""
        folder = Path(folder)
        self.drafter.load(folder)
        state = torch.load(folder / TRAINER_STATE, map_location="cpu", weights_only=True)
        self._drafter_version = state["drafter_version"]
        self._sessions = state["sessions"]
        self._newest_features = state["newest_features"]
        self._needs_vocabulary = state["needs_vocabulary"]
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._rng.set_state(state["rng"])

    def _read(self, shard: FeatureShard) -> list[FeatureRecord]:
        records = read_shard(shard.path)
        first = records[0]
        if first.policy_version not in self._target_weights:
            raise ValueError(
                f"feature shard {shard.path} is of policy version {first.policy_version}, whose head is not known "
                f"(known: {sorted(self._target_weights)}); call set_target_weights first"
            )
        for name, theirs, ours in [
            ("sampler", first.sampler, self._sampler),
            ("aux layers", first.aux_layers, self.drafter.serving.aux_layers),
            ("hidden size", first.final_hidden.shape[1], self._target.hidden_size),
        ]:
            if theirs != ours:
                raise ValueError(f"feature shard {shard.path} has {name} {theirs}, the drafter trains for {ours}")
        Path(shard.path).unlink()
        return records

    def _take_in(self, records: list[FeatureRecord]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if not records:
            return metrics
        self._newest_features = max(self._newest_features, *(record.policy_version for record in records))
        training, holdout = split_holdout(records, self._config.holdout, self._seed)
        if self._needs_vocabulary:
            metrics["drafter/vocabulary_coverage"] = self._choose_vocabulary(training)
        self._holdout.add(holdout)
        # A prompt may come again in a later step and be held out then.
        held_out = {record.prompt_key for record in self._holdout.records}
        self._buffer.drop_prompts(held_out)
        self._buffer.add([record for record in training if record.prompt_key not in held_out])
        self._forget_target_weights()
        return metrics

    def _choose_vocabulary(self, records: list[FeatureRecord]) -> float:
        rollouts = ((r.token_ids[: r.prompt_length], r.token_ids[r.prompt_length :]) for r in records)
        counts = vocabulary_counts(rollouts, self._target.vocab_size)
        return self.choose_vocabulary(counts, records[-1].policy_version)

    def _forget_target_weights(self) -> None:
        needed = {*self._buffer.policy_versions, *self._holdout.policy_versions}
        needed |= {record.policy_version for record in self._fresh}
        self._target_weights = {
            version: weights
            for version, weights in self._target_weights.items()
            if version in needed or version > self._newest_features
        }

    def _update(self, step: int) -> dict[str, float]:
        return self.update(self._buffer.sample(self._config.batch_tokens, self._rng), step)

    def update(self, batch: DraftBatch, step: int) -> dict[str, float]:
        """One optimizer step on a batch. Metrics as in `train`, and num_tokens of the batch."""
        result = self._loss(batch)
        if not result.loss.isfinite():
            raise TrainingDiverged(self._non_finite_message(step, f"loss {float(result.loss.detach())}", batch))
        self._optimizer.zero_grad()
        result.loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
        if not grad_norm.isfinite():
            self._optimizer.zero_grad()
            raise TrainingDiverged(self._non_finite_message(step, f"gradient norm {float(grad_norm)}", batch))
        metrics = {
            "loss": float(result.loss.detach()),
            "grad_norm": float(grad_norm),
            "learning_rate": float(self._scheduler.get_last_lr()[0]),
            "lag_versions": float(self._newest_features - batch.policy_version),
            "num_tokens": float(len(batch.token_ids)),
        }
        metrics |= {f"loss_pos_{k}": loss for k, loss in enumerate(result.per_position.tolist(), start=1)}
        self._optimizer.step()
        self._scheduler.step()
        return metrics

    def _loss(self, batch: DraftBatch) -> DraftLoss:
        target = self._target_weights[batch.policy_version]
        return self.drafter.loss(self._on_device(batch), target, self._sampler, self._config.objective)

    def _acceptances(self, batch: DraftBatch, drafters: Sequence[Drafter]) -> list[StartAcceptance]:
        target = self._target_weights[batch.policy_version]
        return acceptances(drafters, self._on_device(batch), target, self._sampler, self._config.objective)

    def _on_device(self, batch: DraftBatch) -> DraftBatch:
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "policy_version"}
        return replace(batch, **{name: tensor.to(self._device) for name, tensor in tensors.items()})

    def _buffer_metrics(self) -> dict[str, float]:
        stats = self._buffer.stats
        return {
            "drafter/buffer_tokens": self._buffer.num_tokens,
            "drafter/buffer_bytes": self._buffer.num_bytes + self._holdout.num_bytes,
            "drafter/buffer_dropped_for_bytes": stats.dropped_for_bytes,
            "drafter/buffer_dropped_for_age": stats.dropped_for_age,
            "drafter/untrainable_rollouts": stats.untrainable + self._holdout.stats.untrainable,
            "drafter/holdout_tokens": self._holdout.num_tokens,
        }

    def _non_finite_parameters(self) -> str:
        names = [name for name, parameter in self.drafter.named_parameters() if not parameter.isfinite().all()]
        return f"not finite in the drafter: {', '.join(names)}" if names else ""

    def _non_finite_message(self, step: int, what: str, batch: DraftBatch) -> str:
        target = self._target_weights[batch.policy_version]
        causes = [self._non_finite_parameters()]
        for name, matrix in (("embedding", target.embedding), ("head", target.head)):
            if not matrix.isfinite().all():
                causes.append(f"not finite in the target of policy version {batch.policy_version}: {name}")
        found = "; ".join(filter(None, causes)) or "all weights are finite: lower drafter.optimizer.learning_rate"
        return (
            f"drafter training in step {step}: {what} on {int(batch.document_ids[-1]) + 1} rollouts of policy version "
            f"{batch.policy_version}. {found}. The optimizer has not moved"
        )


def vocabulary_counts(rollouts: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """Weighted counts [V] of the tokens of (prompt, response) pairs, each [T] int64, to choose a draft vocabulary."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for prompt, response in rollouts:
        counts += response.bincount(minlength=vocab_size)
        counts += PROMPT_TOKEN_WEIGHT * prompt.bincount(minlength=vocab_size)
    return counts
