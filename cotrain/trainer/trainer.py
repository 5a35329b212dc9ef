"""The drafter trainer of a run: it takes in rollout features, scores drafters and trains on them, and publishes versions.

All random choices come from its own generator, so that a run that is saved and loaded continues bit for bit. It shares no weight,
optimizer or random state with the policy learner.
"""

import copy
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.process.failures import RunFailure
from cotrain.publish.evidence import FreshScores, enough
from cotrain.records import WeightPayload
from cotrain.trainer.buffer import FeatureBuffer, TrainingBatch, batches_of, spread_over_prompts, teacher_of
from cotrain.trainer.spec import MAX_ROLLOUTS, TrainerSpec
from cotrain.transport.features import FeatureRecord, read_shard
from cotrain.weights.digests import DigestedFile
from cotrain.weights.payload import write_payload
from drafters.acceptance import StartAcceptance, rollout_acceptances
from drafters.base import Drafter, SamplingParams, ServingSpec, TargetSpec, TargetWeights
from drafters.build import build_drafter, load_drafter
from drafters.files import read_config, weight_files
from drafters.losses import acceptances, drafter_loss
from drafters.scores import RolloutAcceptance

PROMPT_TOKEN_WEIGHT = 0.1
"""Weight of a prompt token when the draft vocabulary is chosen: only response tokens are ever drafted, but the words
of a prompt tend to come back in its response."""

STATE = "trainer.pt"

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # ends of the names of the target's matrices

TRIAL_S = 60.0  # seconds in which drafters are tried as a start

MIXED_PRECISION = ("cuda",)
"""Devices on which matrix products of training and scoring are in bfloat16, in which engines serve there too. Weights, gradients,
the optimizer's moments, and probabilities and losses are float32 everywhere."""


class TrainingDiverged(RunFailure, FloatingPointError):
    """A loss, gradient or weight of the drafter is not finite."""


@dataclass
class Progress:
    """How far training has come. A checkpoint holds it as it is."""

    needs_vocabulary: bool
    is_new: bool = False  # the drafter's first weights are not those of a checkpoint
    updates: int = 0  # optimizer steps so far
    drafter_version: int = 0  # publications so far
    published_update: int = 0  # optimizer steps behind the newest candidate that was published
    gathered: FreshScores | None = None  # scores of the candidate that waits for more rollouts


STATE_CLASSES: list[Any] = [
    FeatureBuffer, FeatureRecord, FreshScores, Progress, RolloutAcceptance, SamplingParams, TargetWeights,
    np.ndarray, np.dtype, np.dtypes.Float64DType, np.dtypes.Int64DType, _reconstruct,
]  # fmt: skip
"""Classes that a checkpoint may hold; torch.load refuses all others."""


class DrafterTrainer:
    """Trains a drafter on features of recent policy versions, and keeps published drafters. See MIXED_PRECISION."""

    def __init__(
        self, spec: TrainerSpec, model_path: str | Path, init_folder: str | Path | None, device: str = "cpu"
    ) -> None:
        """Build a new drafter, or load it from init_folder.

        model_path is the target's folder; only drafters that start with its weights read them. device: "cpu" or
        "cuda". Raises ValueError when drafter, target and settings do not fit each other.
        """
        config, self._spec, self._device = spec.drafter, spec, device
        self._target = TargetSpec.from_pretrained(model_path)
        if init_folder is None:
            drafter = build_drafter(config.model, self._target, spec.seed)
            drafter.start_from(model_path)
        else:
            drafter = load_drafter(init_folder, self._target, spec.num_positions, config.model)
        self.drafter: Drafter = drafter.to(device)
        self._optimizer, self._scheduler = build_optimizer(drafter.parameters(), config.optimizer, spec.total_updates)
        self.target_weights: dict[int, TargetWeights] = {}  # of each policy version whose features can be taken in
        self._buffer = FeatureBuffer(spec.max_buffer_bytes, config.buffer.max_age)
        self._rng = torch.Generator().manual_seed(spec.seed)
        is_new = init_folder is None
        self._progress = Progress(needs_vocabulary=is_new and config.train, is_new=is_new)
        self._published: dict[int, Drafter] = {0: self._frozen_copy()}
        self._held: tuple[int, Drafter] | None = None  # a candidate that waits for more rollouts, with its updates

    @property
    def drafter_version(self) -> int:
        return self._progress.drafter_version

    @property
    def serving_dtype(self) -> torch.dtype:
        return getattr(torch, self._spec.serving_dtype)

    def serve_as(self, dtype: str) -> None:
        """Publish in another number format from now on, such as "float32"; one that torch does not know is ignored."""
        if isinstance(getattr(torch, dtype, None), torch.dtype):
            self._spec = replace(self._spec, serving_dtype=dtype)

    def serving(self) -> ServingSpec:
        return self.drafter.serving

    def set_target_weights(self, payload_path: str | Path | None, policy_version: int) -> None:
        """Read embedding and head of a policy version from a safetensors file in Hugging Face names, or a model folder.

        payload_path: None for a version that has those of the version before, as with adapters. Call it before features of that version come. Versions beyond max_policy_lag that none needs are forgotten.
        """
        if payload_path is None:
            weights = replace(self.target_weights[max(self.target_weights)], policy_version=policy_version)
        else:
            weights = read_target_weights(payload_path, policy_version, self._target, self._device)
        needed, oldest = self._buffer.policy_versions, policy_version - self._spec.max_policy_lag
        known = self.target_weights | {policy_version: weights}
        self.target_weights = {v: w for v, w in known.items() if v in needed or v >= oldest}

    def _choose_vocabulary(self, records: Sequence[FeatureRecord]) -> dict[str, float]:
        """Choose the draft vocabulary of a new drafter. Returns drafter/vocabulary_coverage, the share of the counted tokens in it."""
        counts = torch.zeros(self._target.vocab_size, dtype=torch.float64)
        for record in records:
            generated = record.response_mask
            counts += record.token_ids[generated].bincount(minlength=len(counts))
            counts += PROMPT_TOKEN_WEIGHT * record.token_ids[~generated].bincount(minlength=len(counts))
        self._progress.needs_vocabulary = False
        target = self.target_weights[records[-1].policy_version]
        return {"drafter/vocabulary_coverage": self.drafter.choose_vocabulary(counts, target)}

    def take_in(
        self, features: Sequence[str | FeatureRecord], serving: int, keep: Collection[int], judged: int = 0
    ) -> tuple[FreshScores, dict[str, float]]:
        """Add the rollouts of a step, and score the serving drafter and the candidate on MAX_ROLLOUTS of them at most.

        A rollout cannot test a drafter that was trained on it. A new drafter's first features choose its vocabulary.

        features: shards, whose files are deleted, or records that have been read. serving: the version that the engines have.
        All publications but this one and those in `keep` are forgotten. judged: updates behind the candidate that was judged last.
        A later one stays the candidate until enough rollouts were scored; meanwhile training continues. Returns the scores, and
        metrics of scoring and of the buffer. Raises ValueError, and adds nothing, when a shard is broken or its policy version or
        aux layers are unknown to the trainer.
        """
        records, metrics = self._read(features), dict[str, float]()
        if records and self._progress.needs_vocabulary:
            metrics = self._choose_vocabulary(records)
        self._buffer.add(records)
        started, cpu_started = time.perf_counter(), time.process_time()
        self._published = {v: drafter for v, drafter in self._published.items() if v in {serving, *keep}}
        records = spread_over_prompts([r for r in records if r.last_segment().is_scorable], MAX_ROLLOUTS)
        scores = self._score(sorted(records, key=teacher_of), serving, judged)  # sorted, so that batches are large
        metrics["drafter/score_s"] = time.perf_counter() - started
        metrics["drafter/score_cpu_s"] = time.process_time() - cpu_started
        return scores, metrics | self._buffer.metrics()

    def _score(self, records: Sequence[FeatureRecord], serving: int, judged: int) -> FreshScores:
        progress, segments = self._progress, [record.last_segment() for record in records]
        if self._held is not None and self._held[0] <= judged:
            self._held = None
        updates, candidate = self._held or (progress.updates, self.drafter)
        has_candidate = updates > max(progress.published_update, judged)
        drafters = [self._published[serving], *([candidate] if has_candidate else [])]
        scores = [rollout_acceptances(starts, self._served_depth) for starts in self._starts(drafters, segments)]
        of_turns = [pair for pair in zip(records, segments, strict=True) for _ in range(pair[1].num_turns)]
        fresh = FreshScores(
            prompts=[record.prompt_key for record, segment in of_turns],
            serving=scores[0],
            candidate=scores[1] if has_candidate else None,
            updates=updates,
            served_by=[record.drafter_version for record, segment in of_turns],
        )
        gathered = progress.gathered = fresh.after(progress.gathered)
        if has_candidate and not enough(gathered.prompts) and self._held is None:
            self._held = updates, self._frozen_copy()
        return replace(fresh, gathered=gathered)

    def start_with_best(self, folders: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        """Continue with the best of these drafters if it beats this trainer's own, "", on rollouts that are held.

        Call it before the first update. After TRIAL_S seconds no other is tried. Returns the expected acceptance length of each that
        could be scored, and of the others why not.
        """
        began, own = time.monotonic(), self.drafter
        records = [last for record in self._buffer.records if (last := record.last_segment()).is_scorable]
        records = sorted(spread_over_prompts(records, MAX_ROLLOUTS), key=teacher_of)
        best, lengths, others = own, dict[str, float](), dict[str, str]()
        for folder in ("", *folders) if records else ():
            try:
                if time.monotonic() - began > TRIAL_S:
                    raise ValueError(f"not tried in {TRIAL_S} s")
                drafter = self._loaded(folder) if folder else own
                [starts] = self._starts([drafter], records)
            except ValueError as error:
                others[folder] = str(error)
                continue
            length = 1 + sum(rollout_acceptances(starts, self._served_depth)[-1].rates())
            best = drafter if length > max(lengths.values(), default=0.0) else best
            lengths[folder] = length
        if best is not own:
            own.load_state_dict(best.state_dict())
            self._progress.is_new = False
        return lengths, others

    def _loaded(self, folder: str) -> Drafter:
        """Return the drafter of a folder. Raises ValueError if engines that serve this trainer's own cannot serve it."""
        drafter = load_drafter(folder, self._target, self._spec.num_positions, self._spec.drafter.model)
        if drafter.serving != self.drafter.serving:
            raise ValueError(f"{folder} needs other hidden states of the policy")
        return drafter.to(self._device)

    def train(self, step: int, num_updates: int) -> dict[str, float]:
        """Take num_updates optimizer steps on batches from the buffer.

        Returns means over the updates of loss (weighted, and per draft position), grad_norm (before clipping) and lag_versions
        (newest policy version held minus the one trained on), the last learning rate, times and buffer metrics. Raises
        TrainingDiverged, before the weights change, when a loss or gradient is not finite, and ValueError if the buffer is empty.
        """
        if not self._buffer.records:
            raise ValueError(
                f"step {step}: no features to train the drafter on: every rollout was dropped or has only holes; "
                "raise rollout.features.max_bytes"
            )
        started, newest, num_tokens, updates = time.perf_counter(), max(self._buffer.policy_versions), 0, []
        for number in range(num_updates):
            batch = self._buffer.sample(self._spec.drafter.batch_tokens, self._rng)
            if self._progress.updates + number == 0:
                target = self.target_weights[batch.rows.policy_version]
                self.drafter.start_training(batch.rows.to(self._device), target, self._progress.is_new)
            updates.append(self._update(batch, step) | {"lag_versions": float(newest - batch.rows.policy_version)})
            num_tokens += len(batch.rows.token_ids)
        seconds = time.perf_counter() - started
        self._progress.updates += num_updates
        metrics = {f"drafter/{name}": sum(u[name] for u in updates) / len(updates) for name in updates[0]}
        metrics["drafter/learning_rate"] = updates[-1]["learning_rate"]
        metrics |= {"drafter/tokens_per_s": num_tokens / seconds, "drafter/train_s": seconds}
        return metrics | self._buffer.metrics()

    def _update(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        rows, sampling = batch
        target, anchors = self.target_weights[rows.policy_version], self._spec.drafter.anchors
        with self._precision():
            rows = rows.to(self._device)
            loss, per_position = drafter_loss(self.drafter, rows, target, sampling, anchors, self._rng)
        self._optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
        learning_rate = float(self._scheduler.get_last_lr()[0])
        metrics = {"loss": float(loss.detach()), "grad_norm": float(grad_norm), "learning_rate": learning_rate}
        if not (loss.isfinite() and grad_norm.isfinite()):
            raise TrainingDiverged(
                f"drafter training in step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} on "
                f"{int(rows.document_ids[-1]) + 1} rollouts of policy version {rows.policy_version}. "
                f"{self._cause(target)}. The optimizer has not moved"
            )
        self._optimizer.step()
        self._scheduler.step()
        return metrics | {f"loss_pos_{k}": value for k, value in enumerate(per_position.tolist(), start=1)}

    def publish(self, weights_of: int | None = None) -> int:
        """Give the candidate's weights, or those of an earlier publication, the next drafter version.

        Raises TrainingDiverged when one of the candidate's is not finite, or so large that numbers in an engine could overflow.
        """
        progress, version = self._progress, self.drafter_version + 1
        if weights_of is not None:
            self._published[version] = self._published[weights_of]
        else:
            updates, drafter = self._held or (progress.updates, self._frozen_copy())
            if problems := drafter.overflowing():
                raise TrainingDiverged(
                    f"drafter version {version} is not published, an engine would compute with {'; '.join(problems)}: "
                    "lower drafter.optimizer.learning_rate"
                )
            self._published[version], progress.published_update = drafter, updates
        self._held = progress.gathered = None
        progress.drafter_version = version
        return version

    def save_checkpoint(self, folder: str | Path, version: int) -> None:
        """Write a publication as the folder that stock vLLM serves, in the engines' number format."""
        self._published[version].save(folder, self.serving_dtype)

    def write_payload(self, path: str | Path, version: int) -> WeightPayload:
        """Write a publication for the engines, in their number format."""
        return write_payload(self._published[version].state_for_serving(), path, self.serving_dtype)

    def drop_earlier_versions(self) -> None:
        """Train no more on features of earlier policy versions than the newest held: a checkpoint then has one target head."""
        self._buffer.drop_earlier_versions()

    def save(self, folder: str | Path, with_features: bool = True) -> None:
        """Write everything an exact continuation needs: drafters in float32, optimizer, buffer, heads of the buffer's versions.

        Whoever loads it sets the target weights of the policy's own version, which are in the policy's checkpoint too.
        with_features: False leaves out buffer and target weights, so that no text of a rollout is written to disk.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "progress": self._progress,
            "drafter": self.drafter.state_dict(),
            "rng": self._rng.get_state(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "published": {version: drafter.state_dict() for version, drafter in self._published.items()},
            "held": None if self._held is None else (self._held[0], self._held[1].state_dict()),
        }
        if with_features:
            needed = self._buffer.policy_versions
            state |= {"buffer": self._buffer}
            state |= {"target_weights": {v: w for v, w in self.target_weights.items() if v in needed}}
        with DigestedFile(folder / STATE) as file:
            torch.save(state, file)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by `save`. Raises ValueError when its drafter does not fit this one."""
        with torch.serialization.safe_globals(STATE_CLASSES):
            state = torch.load(Path(folder) / STATE, map_location="cpu", weights_only=True)
        self.drafter.load_tensors(state["drafter"], folder)
        self._progress, self._buffer = state["progress"], state.get("buffer", self._buffer)
        self.target_weights = {
            version: replace(w, embedding=w.embedding.to(self._device), head=w.head.to(self._device))
            for version, w in state.get("target_weights", {}).items()
        }
        self._rng.set_state(state["rng"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._published = {version: self._frozen_copy(weights) for version, weights in state["published"].items()}
        self._held = None if state["held"] is None else (state["held"][0], self._frozen_copy(state["held"][1]))

    @property
    def _served_depth(self) -> int:
        return min(self._spec.num_speculative_tokens, self.drafter.shape.trained_depth)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16, enabled=self._device in MIXED_PRECISION)

    def _starts(self, drafters: Sequence[Drafter], records: Sequence[FeatureRecord]) -> list[list[StartAcceptance]]:
        """Return, for each drafter, the acceptance at the starts of these rollouts, by batch."""
        parts, config = [], self._spec.drafter
        for rows, sampling in batches_of(records, config.batch_tokens):
            target = self.target_weights[rows.policy_version]
            with self._precision():
                parts.append(acceptances(drafters, rows.to(self._device), target, sampling, self._served_depth))
        return [[part[i] for part in parts] for i in range(len(drafters))]

    def _cause(self, target: TargetWeights) -> str:
        """Say what is not finite, or else what to change."""
        causes = self.drafter.overflowing()
        for name, matrix in (("embedding", target.embedding), ("head", target.head)):
            if not matrix.isfinite().all():
                causes.append(f"the target's {name} of policy version {target.policy_version} is not finite")
        return "; ".join(causes) or "All weights are finite: lower drafter.optimizer.learning_rate"

    def _frozen_copy(self, weights: dict[str, Any] | None = None) -> Drafter:
        frozen = copy.deepcopy(self.drafter).requires_grad_(False)
        if weights is not None:
            frozen.load_state_dict(weights)
        return frozen

    def _read(self, features: Sequence[str | FeatureRecord]) -> list[FeatureRecord]:
        """Return all records. The files of shards are deleted when all can be trained on."""
        shards = {one: read_shard(one) for one in features if isinstance(one, str)}
        known, layers = sorted(self.target_weights), self.drafter.serving.aux_layers
        for shard, record in ((shard, record) for shard, records in shards.items() for record in records):
            problem = f"features that cannot be trained on: {shard} has"
            if record.policy_version not in self.target_weights:
                raise ValueError(f"{problem} policy version {record.policy_version}, the trainer knows {known}")
            if record.aux_layers != layers:
                raise ValueError(f"{problem} aux layers {record.aux_layers}, the trainer knows {[layers]}")
        for shard in shards:
            Path(shard).unlink()
        return [record for one in features for record in (shards[one] if isinstance(one, str) else [one])]


def read_target_weights(
    path: str | Path, policy_version: int, target: TargetSpec, device: str | torch.device
) -> TargetWeights:
    """Read embedding and head, and nothing else, from a safetensors file in Hugging Face names, or from a model folder.

    Without an lm_head, the target is tied and its head is the embedding. Both are copies: the file may be overwritten.
    Raises ValueError when a file is unreadable, has no embedding, or is of another target.
    """
    path = Path(path)
    # The head in the folder of a tied model is a leftover copy, which no engine loads.
    tied = path.is_dir() and read_config(path).get("tie_word_embeddings")
    suffixes = EMBEDDING if tied else (EMBEDDING, HEAD)
    matrices: dict[str, Tensor] = {}
    try:
        for part in weight_files(path) if path.is_dir() else [path]:
            with safe_open(part, framework="pt") as file:
                wanted = [name for name in file.keys() if name.endswith(suffixes)]  # noqa: SIM118
                matrices |= {name: file.get_tensor(name).to(device, copy=True) for name in wanted}
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"target weights {path} cannot be read: {error}") from error
    embeddings, heads = ([name for name in matrices if name.endswith(suffix)] for suffix in (EMBEDDING, HEAD))
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(f"{path} has {embeddings} and {heads}; expected one embedding, at most one head")
    expected = (target.vocab_size, target.hidden_size)
    for name, matrix in matrices.items():
        if tuple(matrix.shape) != expected:
            raise ValueError(f"{name} in {path} is {tuple(matrix.shape)}, the target's is {expected}")
    return TargetWeights(matrices[embeddings[0]], matrices[[*heads, *embeddings][0]], policy_version)
