"""Features of recorded rollouts: kept on disk up to a limit, otherwise computed again by the engine."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from cotrain.records import FeatureShard
from cotrain.transport.features import FeatureRecord, read_shard, write_records
from pipelines.initialise.corpus import StoredRollout, disk_full_named

SEGMENT_ROLLOUTS = 256
"""Most rollouts of a segment: what is computed, cached and shuffled as one."""


class SequenceTap(Protocol):
    """The engine, as far as features are concerned."""

    async def tap_sequences(self, sequences: list[tuple[list[int], int]]) -> list[FeatureShard]:
        """Hidden states of (token ids, prompt length) each, in order; the files are the caller's."""
        ...


class FeatureStore:
    """Features by segment. One segment's name stands for the same rollouts throughout a run."""

    def __init__(
        self,
        engine: SequenceTap,
        folder: Path,
        max_bytes: int,
        aux_layers: tuple[int, ...],
        say: Callable[[str], None],
    ) -> None:
        """folder holds at most max_bytes of shards; 0 keeps none."""
        self._engine, self._folder, self._max_bytes = engine, folder, max_bytes
        self._aux_layers, self._say = aux_layers, say
        self.num_computed = 0
        """Tokens whose features were computed, over all calls of `load`."""

    async def load(self, segment: str, rollouts: Sequence[StoredRollout]) -> list[FeatureRecord]:
        """One record for each rollout, in order."""
        path = self._folder / f"{segment}.safetensors"
        if path.exists():
            try:
                return self._read_cached(path, rollouts)
            except ValueError as error:
                self._say(f"cached features are not used and computed again: {error}")
                path.unlink()
        records = await self._compute(rollouts)
        if self._max_bytes and self._cached_bytes() + sum(r.num_bytes for r in records) <= self._max_bytes:
            self._folder.mkdir(exist_ok=True)
            with disk_full_named("cached features (init.cache_gib = 0 keeps none)", self._folder):
                write_records(path, records)
        return records

    def _read_cached(self, path: Path, rollouts: Sequence[StoredRollout]) -> list[FeatureRecord]:
        records = read_shard(path)
        theirs = [(r.token_ids.tolist(), r.prompt_length, r.aux_layers) for r in records]
        wanted = [(*_sequence(rollout), self._aux_layers) for rollout in rollouts]
        if theirs != wanted:
            raise ValueError(f"feature shard {path} is of other rollouts or layers")
        return records

    async def _compute(self, rollouts: Sequence[StoredRollout]) -> list[FeatureRecord]:
        records: list[FeatureRecord] = []
        for shard in await self._engine.tap_sequences([_sequence(rollout) for rollout in rollouts]):
            records += read_shard(shard.path)
            os.unlink(shard.path)
        self.num_computed += sum(record.num_tokens for record in records)
        return records

    def _cached_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))

    def clear(self) -> None:
        """Delete the cache."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _sequence(rollout: StoredRollout) -> tuple[list[int], int]:
    return rollout.prompt_token_ids + rollout.token_ids, len(rollout.prompt_token_ids)
