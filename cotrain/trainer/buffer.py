"""Rollout features held for training, bounded by bytes and by age in policy versions.

A batch holds whole rollouts of one policy version and one sampling, because the teacher's distribution needs one head and one
set of sampling parameters. Rollouts are drawn without replacement until all have been used (an epoch), those of the newest
policy version first, so that fresh rollouts are used before older ones are used again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import torch

from cotrain.transport.features import FeatureRecord
from drafters.alignment import DraftBatch
from drafters.base import SamplingParams


class TrainingBatch(NamedTuple):
    rows: DraftBatch
    sampling: SamplingParams


class FeatureBuffer:
    """A bounded first-in, first-out buffer of rollouts with their features."""

    def __init__(self, max_bytes: int, max_age: int):
        """max_age: how many policy versions a rollout may be behind the newest one held; 0 keeps only the newest version."""
        self.max_bytes, self.max_age = max_bytes, max_age
        self.records: list[FeatureRecord] = []  # oldest first
        self._used: set[FeatureRecord] = set()  # in this epoch
        self._dropped_for_bytes = self._dropped_for_age = self._dropped_for_checkpoints = self._untrainable = 0

    @property
    def policy_versions(self) -> set[int]:
        return {record.policy_version for record in self.records}

    def add(self, records: Sequence[FeatureRecord]) -> None:
        """Add rollouts, then drop those that are too old and, oldest first, those beyond max_bytes."""
        trainable = [record for record in records if record.is_trainable]
        self._untrainable += len(records) - len(trainable)
        self.records += trainable
        self._dropped_for_age += self._keep_from(max(self.policy_versions, default=0) - self.max_age)
        surplus = sum(record.num_bytes for record in self.records) - self.max_bytes
        while surplus > 0:
            surplus -= self.records.pop(0).num_bytes
            self._dropped_for_bytes += 1
        self._used &= set(self.records)

    def drop_earlier_versions(self) -> None:
        """Drop all rollouts but those of the newest policy version held, so that a checkpoint needs the head of this one only."""
        self._dropped_for_checkpoints += self._keep_from(max(self.policy_versions, default=0))
        self._used &= set(self.records)

    def _keep_from(self, oldest: int) -> int:
        """Drop rollouts of policy versions before `oldest`. Returns how many there were."""
        held, self.records = self.records, [record for record in self.records if record.policy_version >= oldest]
        return len(held) - len(self.records)

    def sample(self, batch_tokens: int, rng: torch.Generator) -> TrainingBatch:
        """Draw whole rollouts of one policy version and sampling, at most batch_tokens in all; a longer rollout comes alone.

        The rollouts left of them in this epoch are split evenly, so that no batch is small. The buffer must not be empty.
        """
        if len(self._used) == len(self.records):
            self._used.clear()
        unused = [record for record in self.records if record not in self._used]
        newest = max(record.policy_version for record in unused)
        unused = [record for record in unused if record.policy_version == newest]
        drawn = [unused[index] for index in torch.randperm(len(unused), generator=rng).tolist()]
        drawn = [record for record in drawn if record.sampling == drawn[0].sampling]
        tokens_left = sum(record.num_tokens for record in drawn)
        share = tokens_left / ceil(tokens_left / batch_tokens)
        chosen: list[FeatureRecord] = []
        num_tokens = 0
        for record in drawn:
            if chosen and (num_tokens >= share or num_tokens + record.num_tokens > batch_tokens):
                break
            chosen.append(record)
            num_tokens += record.num_tokens
        self._used.update(chosen)
        return pack(chosen)

    def metrics(self) -> dict[str, float]:
        """Return what is held, and how many rollouts since the start of the run were dropped or never entered."""
        return {
            "drafter/buffer_tokens": sum(record.num_tokens for record in self.records),
            "drafter/buffer_bytes": sum(record.num_bytes for record in self.records),
            "drafter/buffer_dropped_for_bytes": self._dropped_for_bytes,
            "drafter/buffer_dropped_for_age": self._dropped_for_age,
            "drafter/buffer_dropped_for_checkpoints": self._dropped_for_checkpoints,
            "drafter/untrainable_rollouts": self._untrainable,
        }


def spread_over_prompts(records: Sequence[FeatureRecord], most: int) -> list[FeatureRecord]:
    """Choose at most `most` rollouts, the first of each prompt, then the second of each, and so on; keep the order given."""
    seen: Counter[str] = Counter()
    ranks = []
    for index, record in enumerate(records):
        ranks.append((seen[record.prompt_key], index))
        seen[record.prompt_key] += 1
    return [records[index] for index in sorted(index for _, index in sorted(ranks)[:most])]


def teacher_of(record: FeatureRecord) -> tuple[int, SamplingParams]:
    """Return the policy version whose head teaches a drafter on this rollout, and the sampling; one batch shares both."""
    return record.policy_version, record.sampling


def batches_of(records: Iterable[FeatureRecord], batch_tokens: int) -> list[TrainingBatch]:
    """Pack all rollouts, in order, into batches of one policy version and sampling and at most batch_tokens."""
    groups: list[list[FeatureRecord]] = []
    for record in records:
        last = groups[-1] if groups else []
        num_tokens = sum(r.num_tokens for r in last) + record.num_tokens
        if last and teacher_of(last[0]) == teacher_of(record) and num_tokens <= batch_tokens:
            last.append(record)
        else:
            groups.append([record])
    return [pack(group) for group in groups]


def pack(records: Sequence[FeatureRecord]) -> TrainingBatch:
    """Pack rollouts of one policy version and sampling into one batch."""
    log_probs = [r.log_probs for r in records if r.log_probs is not None]
    rows = DraftBatch(
        token_ids=torch.cat([r.token_ids for r in records]),
        aux_hidden=torch.cat([r.aux_hidden for r in records]),
        final_hidden=torch.cat([r.final_hidden for r in records]),
        feature_mask=torch.cat([r.feature_mask for r in records]),
        response_mask=torch.cat([r.response_mask for r in records]),
        positions=torch.cat([torch.arange(r.num_tokens) for r in records]),
        document_ids=torch.cat([torch.full((r.num_tokens,), i) for i, r in enumerate(records)]),
        policy_version=records[0].policy_version,
        log_probs=torch.cat(log_probs) if len(log_probs) == len(records) else None,
    )
    return TrainingBatch(rows, records[0].sampling)
