"""The drafter trainer of a run: it takes in rollout features, scores drafters and trains on them, and publishes versions.

All random choices come from its own generator, so that a run that is saved and loaded continues bit for bit.
"""

import copy
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cotrain.config.schema import MIN_PROMPTS, MIN_ROLLOUTS
from cotrain.records import WeightPayload
from cotrain.trainer.buffer import FeatureBuffer, spread_over_prompts, teacher_of
from cotrain.trainer.distiller import Distiller
from cotrain.trainer.spec import TrainerSpec
from cotrain.transport.features import FeatureRecord, read_shard
from cotrain.weights.payload import write_payload
from drafters.acceptance import RolloutAcceptance, rollout_acceptances
from drafters.base import Drafter, SamplingParams, ServingSpec, TargetWeights

MAX_ROLLOUTS = 32
"""Most rollouts of a step that drafters are scored on, spread over its prompts: scoring all of a large step would cost
a tenth of its time and decide little better."""

STATE = "trainer.pt"


def enough(prompts: Sequence[str]) -> bool:
    """Whether rollouts of these prompts [R] can judge a candidate."""
    return len(prompts) >= MIN_ROLLOUTS and len(set(prompts)) >= MIN_PROMPTS


@dataclass(frozen=True, eq=False)
class FreshScores:
    """Expected acceptance on rollouts, before any drafter was trained on them."""

    prompts: list[str]
    """[R] prompt of each rollout."""
    serving: list[RolloutAcceptance]
    """[K] of the serving drafter at draft lengths 1 to K."""
    candidate: list[RolloutAcceptance] | None
    """[K] of the candidate; None where all weights so far were judged or published."""
    updates: int
    """Optimizer steps that led to the candidate."""
    served_by: list[int]
    """[R] drafter version that the last segment of each rollout was drafted with."""
    served: list[RolloutAcceptance] | None = None
    """[K] of the serving drafter, where it has drafted, if drafts come from history too; None where it drafts throughout."""
    steps: int = 1
    """Steps that the rollouts are of."""
    gathered: "FreshScores | None" = None
    """The same candidate on these rollouts and those of the steps before; None is these alone. Nothing but the gate reads it."""

    @property
    def suffice(self) -> bool:
        """Whether a candidate can be judged by them."""
        return enough(self.prompts)

    def after(self, earlier: "FreshScores | None") -> "FreshScores":
        """Return these scores and earlier ones together, or these alone if the earlier ones are not of the same candidate."""
        if earlier is None or earlier.updates != self.updates or not (self.candidate and earlier.candidate):
            return self
        pairs = [zip(earlier.serving, self.serving, strict=True), zip(earlier.candidate, self.candidate, strict=True)]
        serving, candidate = ([old.joined(new) for old, new in pair] for pair in pairs)
        prompts, served_by = earlier.prompts + self.prompts, earlier.served_by + self.served_by
        return FreshScores(prompts, serving, candidate, self.updates, served_by, steps=earlier.steps + 1)


PLAIN_STATE = (
    "drafter_version", "_updates", "_published_update", "_needs_vocabulary", "_buffer", "_target_weights", "_gathered",
)  # fmt: skip
"""Attributes of a trainer that a checkpoint holds as they are."""
STATE_CLASSES: list[Any] = [
    FeatureBuffer, FeatureRecord, FreshScores, RolloutAcceptance, SamplingParams, TargetWeights,
]  # fmt: skip
"""Classes that a checkpoint may hold; torch.load refuses all others."""


class DrafterTrainer(Distiller):
    """Trains the drafter on features of recent policy versions, and keeps published drafters."""

    def __init__(
        self, spec: TrainerSpec, model_path: str | Path, init_folder: str | Path | None, device: str = "cpu"
    ) -> None:
        """The arguments are those of Distiller."""
        super().__init__(spec, model_path, init_folder, device)
        self._max_policy_lag = spec.max_policy_lag
        self.drafter_version = 0
        """Publications so far."""
        self._updates = self._published_update = 0
        self._published: dict[int, Drafter] = {0: self._frozen_copy()}
        self._gathered: FreshScores | None = None
        self._held: tuple[int, Drafter] | None = None  # a candidate that waits for more rollouts, with its updates
        self._buffer = FeatureBuffer(spec.max_buffer_bytes, spec.drafter.buffer.max_age)
        self._fresh: list[FeatureRecord] = []
        self._needs_vocabulary = init_folder is None and spec.drafter.train
        self._rng = torch.Generator().manual_seed(spec.seed)

    @property
    def policy_versions(self) -> set[int]:
        """Policy versions whose head is known, so that their features can be taken in."""
        return set(self._target_weights)

    def serving(self) -> ServingSpec:
        return self.drafter.serving

    def set_target_weights(self, payload_path: str | Path, policy_version: int) -> None:
        """Like Distiller's. Versions beyond max_policy_lag that no held feature needs are forgotten."""
        super().set_target_weights(payload_path, policy_version)
        held, oldest = self._buffer.policy_versions, policy_version - self._max_policy_lag
        self._target_weights = {v: w for v, w in self._target_weights.items() if v in held or v >= oldest}

    def add_features(self, shards: Sequence[str | FeatureRecord]) -> dict[str, float]:
        """Keep the rollouts of shards, which are files to read and delete, or of records that have been read.

        The first features of a new drafter also choose its draft vocabulary (drafter/vocabulary_coverage: share of
        the counted tokens in it). Raises ValueError, and keeps nothing, when a shard is broken or its
        policy version or aux layers are unknown to the trainer.
        """
        files = [shard for shard in shards if isinstance(shard, str)]
        records = [shard for shard in shards if isinstance(shard, FeatureRecord)]
        records += [record for file in files for record in self._read(file)]
        for file in files:
            Path(file).unlink()
        self._fresh = [record for record in records if record.is_trainable]
        metrics: dict[str, float] = {}
        if records and self._needs_vocabulary:
            self._needs_vocabulary = False
            rollouts = ((r.token_ids[: r.prompt_length], r.token_ids[r.prompt_length :]) for r in records)
            metrics["drafter/vocabulary_coverage"] = self.choose_vocabulary(rollouts, records[-1].policy_version)
        self._buffer.add(records)
        return metrics | self._buffer.metrics()

    def take_in(
        self, shards: Sequence[str | FeatureRecord], serving: int, keep: Collection[int], judged: int
    ) -> tuple[FreshScores, dict[str, float]]:
        """Call `add_features` and `score_fresh`. Returns the scores, and the metrics with the time that scoring took."""
        metrics = self.add_features(shards)
        started, cpu_started = time.perf_counter(), time.process_time()
        scores = self.score_fresh(serving, keep, judged)
        metrics["drafter/score_s"] = time.perf_counter() - started
        metrics["drafter/score_cpu_s"] = time.process_time() - cpu_started
        return scores, metrics

    def score_fresh(self, serving: int, keep: Collection[int], judged: int = 0) -> FreshScores:
        """Score the serving drafter and the candidate on the rollouts of the last `add_features`, on MAX_ROLLOUTS at most.

        Call it before `train`, since a rollout cannot test a drafter that was trained on it. serving: the version that
        the engines have. All publications but this one and those in `keep` are forgotten. judged: updates behind the candidate
        that was judged last. A later one stays the candidate until enough rollouts were scored; meanwhile training continues.
        """
        self._published = {v: drafter for v, drafter in self._published.items() if v in {serving, *keep}}
        records = spread_over_prompts([r for r in self._fresh if r.last_segment().is_scorable], MAX_ROLLOUTS)
        records.sort(key=teacher_of)  # which makes batches of one head and sampling as large as possible
        prompts = [record.prompt_key for record in records]
        records = [record.last_segment() for record in records]
        if self._held is not None and self._held[0] <= judged:
            self._held = None
        updates, candidate = self._held or (self._updates, self.drafter)
        has_candidate = updates > max(self._published_update, judged)
        drafters = [self._published[serving], *([candidate] if has_candidate else [])]
        starts, drafted = self._starts(drafters, records), [r.drafted for r in records if r.drafted is not None]
        scores = [rollout_acceptances(of_drafter, self._served_depth) for of_drafter in starts]
        served = rollout_acceptances(starts[0], self._served_depth, drafted) if drafted else None
        served_by = [record.drafter_version for record in records]
        fresh = FreshScores(prompts, scores[0], scores[1] if has_candidate else None, updates, served_by, served)
        self._gathered = fresh.after(self._gathered)
        return replace(fresh, gathered=self._gathered)

    def train(self, step: int, num_updates: int) -> dict[str, float]:
        """Take num_updates optimizer steps on batches from the buffer.

        Returns means over the updates of the metrics of `update` and of lag_versions (newest policy version held minus
        the one trained on), the last learning rate, times and buffer metrics. Raises ValueError if the buffer is empty.
        """
        if not self._buffer.records:
            raise ValueError(
                f"step {step}: no features to train the drafter on: every rollout was dropped or has only holes; "
                "raise rollout.features.max_bytes"
            )
        waits = self._gathered is not None and self._gathered.candidate is not None and not self._gathered.suffice
        if waits and self._held is None:
            self._held = self._updates, self._frozen_copy()
        started, newest, updates = time.perf_counter(), max(self._buffer.policy_versions), []
        for _ in range(num_updates):
            batch = self._buffer.sample(self._config.batch_tokens, self._rng)
            updates.append(self.update(batch, step))
            updates[-1]["lag_versions"] = float(newest - batch.rows.policy_version)
        seconds = time.perf_counter() - started
        self._updates += num_updates
        num_tokens = sum(update.pop("num_tokens") for update in updates)
        metrics = {f"drafter/{name}": sum(u[name] for u in updates) / len(updates) for name in updates[0]}
        metrics["drafter/learning_rate"] = updates[-1]["learning_rate"]
        metrics |= {"drafter/tokens_per_s": num_tokens / seconds, "drafter/train_s": seconds}
        return metrics | self._buffer.metrics()

    def publish(self, weights_of: int | None = None) -> int:
        """Give the candidate's weights, or those of an earlier publication, the next drafter version.

        Raises TrainingDiverged when one of the candidate's is not finite, or so large that numbers in an engine could overflow.
        """
        version = self.drafter_version + 1
        if weights_of is not None:
            self._published[version] = self._published[weights_of]
        else:
            updates, drafter = self._held or (self._updates, self._frozen_copy())
            self.check_publishable(version, drafter)
            self._published[version], self._published_update = drafter, updates
        self._held = self._gathered = None
        self.drafter_version = version
        return version

    def save_checkpoint(self, folder: str | Path, version: int) -> None:
        """Write a publication as the folder that stock vLLM serves, in the engines' number format."""
        self._published[version].save(folder, self.serving_dtype)

    def write_payload(self, path: str | Path, version: int) -> WeightPayload:
        """Write a publication for the engines, in their number format."""
        return write_payload(self._published[version].state_for_serving(), path, self.serving_dtype)

    def save(self, folder: str | Path, with_features: bool = True) -> None:
        """Write everything an exact continuation needs: drafters in float32, optimizer, buffer, target weights.

        with_features: False leaves out buffer and target weights, so that no text of a rollout is written to disk.
        """
        super().save(folder)
        state = {name: getattr(self, name) for name in PLAIN_STATE}
        if not with_features:
            empty = FeatureBuffer(self._buffer.max_bytes, self._buffer.max_age)
            state |= {"_buffer": empty, "_target_weights": dict[int, TargetWeights](), "_gathered": None}
        state["published"] = {version: drafter.state_dict() for version, drafter in self._published.items()}
        state["held"] = None if self._held is None else (self._held[0], self._held[1].state_dict())
        torch.save(state | {"rng": self._rng.get_state()}, Path(folder) / STATE)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by `save`. Raises ValueError when its drafter does not fit this one."""
        super().load(folder)
        with torch.serialization.safe_globals(STATE_CLASSES):
            state = torch.load(Path(folder) / STATE, map_location="cpu", weights_only=True)
        for name in PLAIN_STATE:
            setattr(self, name, state[name])
        for version, w in self._target_weights.items():
            on_device = replace(w, embedding=w.embedding.to(self._device), head=w.head.to(self._device))
            self._target_weights[version] = on_device
        self._published = {version: self._frozen_copy(weights) for version, weights in state["published"].items()}
        self._held = None if state["held"] is None else (state["held"][0], self._frozen_copy(state["held"][1]))
        self._rng.set_state(state["rng"])

    def _frozen_copy(self, weights: dict[str, Any] | None = None) -> Drafter:
        frozen = copy.deepcopy(self.drafter).requires_grad_(False)
        if weights is not None:
            frozen.load_state_dict(weights)
        return frozen

    def _read(self, shard: str) -> list[FeatureRecord]:
        records = read_shard(shard)
        for record in records:
            for name, theirs, known in (
                ("policy version", record.policy_version, sorted(self._target_weights)),
                ("aux layers", record.aux_layers, [self.drafter.serving.aux_layers]),
            ):
                if theirs not in known:
                    raise ValueError(
                        f"features that cannot be trained on: {shard} has {name} {theirs}, the trainer knows {known}"
                    )
        return records
