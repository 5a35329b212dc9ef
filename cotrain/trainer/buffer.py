"""Rollout features held for training, bounded by bytes and by age in policy versions.

Batches are whole rollouts of one policy version, because the teacher's head is of one version. Rollouts are drawn
without replacement until all have been used (an epoch), the newest version first, so that fresh rollouts are seen
before older ones are seen again.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from math import ceil
from typing import Any

import torch

from cotrain.transport.features import FeatureRecord
from drafters.alignment import DraftBatch
from drafters.base import SamplingParams


@dataclass
class BufferStats:
    """Rollouts that left or never entered, since the start of the run."""

    dropped_for_bytes: int = 0
    dropped_for_age: int = 0
    untrainable: int = 0
    """Without a single draft position to supervise (too short, or nothing but holes)."""


@dataclass
class _Entry:
    record: FeatureRecord
    used: bool = False  # in this epoch


class FeatureBuffer:
    """First in, first out, bounded."""

    def __init__(self, max_bytes: int, max_age: int):
        """max_age: oldest policy version kept, counted back from the newest that was added; 0 keeps only the newest."""
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.stats = BufferStats()
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def records(self) -> list[FeatureRecord]:
        """Oldest first."""
        return [entry.record for entry in self._entries]

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.records)

    @property
    def num_tokens(self) -> int:
        return sum(record.num_tokens for record in self.records)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Versions held, ascending."""
        return tuple(sorted({record.policy_version for record in self.records}))

    def add(self, records: Sequence[FeatureRecord]) -> None:
        """Take in rollouts, then drop what is too old or too much, oldest first."""
        trainable = [_Entry(record) for record in records if record.is_trainable]
        self.stats.untrainable += len(records) - len(trainable)
        entries = [*self._entries, *trainable]
        oldest_kept = max((entry.record.policy_version for entry in entries), default=0) - self.max_age
        self._entries = deque(entry for entry in entries if entry.record.policy_version >= oldest_kept)
        self.stats.dropped_for_age += len(entries) - len(self._entries)
        surplus = self.num_bytes - self.max_bytes
        while surplus > 0:
            surplus -= self._entries.popleft().record.num_bytes
            self.stats.dropped_for_bytes += 1

    def sample(self, batch_tokens: int, rng: torch.Generator) -> DraftBatch:
        """Whole rollouts of one policy version, at most batch_tokens together; a longer rollout comes alone.

        What is left of a version in this epoch is split evenly, so that no batch is a small remainder. The buffer must
        not be empty.
        """
        if all(entry.used for entry in self._entries):
            for entry in self._entries:
                entry.used = False
        newest = max(entry.record.policy_version for entry in self._entries if not entry.used)
        unused = [e for e in self._entries if not e.used and e.record.policy_version == newest]
        tokens_left = sum(entry.record.num_tokens for entry in unused)
        share = tokens_left / ceil(tokens_left / batch_tokens)
        chosen: list[FeatureRecord] = []
        num_tokens = 0
        for index in torch.randperm(len(unused), generator=rng).tolist():
            entry = unused[index]
            if chosen and num_tokens + entry.record.num_tokens > batch_tokens:
                break
            entry.used = True
            chosen.append(entry.record)
            num_tokens += entry.record.num_tokens
            if num_tokens >= share:
                break
        return pack(chosen)

    def state(self) -> dict[str, Any]:
        """All rollouts, the state of the epoch, and the counts of BufferStats, for torch.save."""
        rows = [{f.name: getattr(record, f.name) for f in fields(record)} for record in self.records]
        rows = [row | {"sampling": astuple(row["sampling"])} for row in rows]
        return {"rows": rows, "used": [entry.used for entry in self._entries], "stats": asdict(self.stats)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Become the buffer that was saved; the bounds stay."""
        records = [FeatureRecord(**row | {"sampling": SamplingParams(*row["sampling"])}) for row in state["rows"]]
        self._entries = deque(_Entry(*entry) for entry in zip(records, state["used"], strict=True))
        self.stats = BufferStats(**state["stats"])


def spread_over_prompts(records: Sequence[FeatureRecord], most: int) -> list[FeatureRecord]:
    """At most `most` rollouts in the order given: the first of each prompt, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for index, record in enumerate(records):
        ranks.append((seen[record.prompt_key], index))
        seen[record.prompt_key] += 1
    return [records[index] for index in sorted(index for _, index in sorted(ranks)[:most])]


def batches_of(records: Iterable[FeatureRecord], batch_tokens: int) -> list[DraftBatch]:
    """All rollouts in order, in batches of one policy version and at most batch_tokens."""
    groups: list[list[FeatureRecord]] = []
    for record in records:
        last = groups[-1] if groups else []
        num_tokens = sum(r.num_tokens for r in last) + record.num_tokens
        if last and last[0].policy_version == record.policy_version and num_tokens <= batch_tokens:
            last.append(record)
        else:
            groups.append([record])
    return [pack(group) for group in groups]


def pack(records: Sequence[FeatureRecord]) -> DraftBatch:
    """One batch of rollouts of one policy version."""
    return DraftBatch(
        token_ids=torch.cat([r.token_ids for r in records]),
        aux_hidden=torch.cat([r.aux_hidden for r in records]),
        final_hidden=torch.cat([r.final_hidden for r in records]),
        feature_mask=torch.cat([r.feature_mask for r in records]),
        response_mask=torch.cat([torch.arange(r.num_tokens) >= r.prompt_length for r in records]),
        positions=torch.cat([torch.arange(r.num_tokens) for r in records]),
        document_ids=torch.cat([torch.full((r.num_tokens,), i) for i, r in enumerate(records)]),
        policy_version=records[0].policy_version,
    )
