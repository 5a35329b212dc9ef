"""The engines of a host as the trainer sees them: it reads what they write to the spool, and they follow its current.json."""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from cotrain.records import GainReport, Rollout, RolloutBatch, Segment, SwapReport, Versions, WeightPayload
from cotrain.rollout.acceptance_stats import counts_of_steps, total_counts
from cotrain.sidecar.spool import EngineFolder, Spool, read_json, write_json
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, read_shard


class Engine(NamedTuple):
    """One engine of the host, as it last described itself."""

    folder: EngineFolder
    facts: dict[str, Any]
    state: dict[str, Any]

    @property
    def lives(self) -> bool:
        """Whether its process is alive and the sidecar is attached to its worker."""
        return self.facts["attached"] and Path(f"/proc/{self.facts['pid']}").exists()


class Intake:
    """Reads and deletes shards. The trainer's policy versions number the distinct output heads of all engines."""

    def __init__(self, spool: Spool, trainer: DrafterTrainer, most_drafted: int, heads: list[str]):
        """most_drafted: most draft tokens of a verification step. heads: digest of the head of each policy version so far."""
        self._spool, self._trainer, self._most, self.heads = spool, trainer, most_drafted, heads
        self.engines: dict[str, Engine] = {}
        self.waiting: list[tuple[Rollout, FeatureRecord]] = []
        self._seconds, self._gain, self._dropped = Counter[str](), GainReport(), 0
        self._versions: dict[Path, int] = {}

    def poll(self) -> None:
        """Take in what has come since the last call, and forget engines whose process is gone."""
        for folder in self._spool.engines():
            if facts := read_json(folder.facts):
                self.engines[folder.facts.parent.name] = Engine(folder, facts, read_json(folder.state) or {})
        for name, engine in list(self.engines.items()):
            is_gone = engine.facts["attached"] and not engine.lives  # checked first: its last shards are then complete
            for shard in engine.folder.shards():
                self._take(name, engine, shard)
            if is_gone:
                shutil.rmtree(engine.folder.facts.parent, ignore_errors=True)
                del self.engines[name]

    def take(self) -> RolloutBatch:
        """Hand over all waiting rollouts (at least one) with their records, and what the engines measured meanwhile."""
        rollouts, records = map(list, zip(*self.waiting, strict=True))
        counts, num_tokens = total_counts(r.speculation for r in rollouts), sum(len(r.token_ids) for r in rollouts)
        batch = RolloutBatch(rollouts, records, counts, max(self._seconds.values()), num_tokens, gain=self._gain)
        self.waiting, self._gain = [], GainReport()
        self._seconds.clear()
        return batch

    def metrics(self) -> dict[str, float]:
        """Return what the present engines have counted since they started, and the number of dropped rollouts."""
        states, counts = [engine.state for engine in self.engines.values()], Counter[str](dropped=self._dropped)
        for state in states:
            counts.update({"tapped": state.get("tapped", 0), "hooks_off": len(state.get("hooks_off", ()))})
            counts["dropped"] += sum(state.get("dropped", {}).values())
            counts.update({f"{part}_s": seconds for part, seconds in state.get("seconds", {}).items()})
        return {f"sidecar/{name}": float(value) for name, value in [("engines", len(states)), *counts.items()]}

    def _take(self, name: str, engine: Engine, shard: Path) -> None:
        described = read_json(shard.with_suffix(".json"))
        for window in described["windows"]:
            self._gain += GainReport(**window["gain"])
            self._seconds[name] += sum(seconds for *_, seconds in window["steps"])
        try:
            for told, record in zip(described["rollouts"], read_shard(shard), strict=True):
                self._seconds["a request"] = max(self._seconds["a request"], told["seconds"])
                self.waiting += self._one(engine, told, record)
        except ValueError:  # a broken file
            self._dropped += len(described["rollouts"])
        shard.with_suffix(".json").unlink()
        shard.unlink(missing_ok=True)

    def _one(
        self, engine: Engine, told: dict[str, Any], record: FeatureRecord
    ) -> Iterator[tuple[Rollout, FeatureRecord]]:
        """Yield the rollout and its record with the trainer's policy versions, or nothing if the head of one is gone."""
        try:
            earlier = [Segment(self._stamped(engine, text), *span) for text, *span in told["earlier"]]
            versions = self._stamped(engine, told["versions"])
        except FileNotFoundError:
            self._dropped += 1
            return
        tokens, split = record.token_ids.tolist(), record.prompt_length
        steps = [(drafted, taken) for drafted, taken in told["verification_steps"]]
        rollout = Rollout(
            record.prompt_key, len(self.waiting), tokens[:split], tokens[split:], [], "", told["finish_reason"], versions,
            counts_of_steps(steps, self._most), tuple(steps), tuple(earlier),
        )  # fmt: skip
        yield rollout, replace(record, policy_version=versions.policy)

    def _stamped(self, engine: Engine, text: str) -> Versions:
        """Return the versions of an engine's stamp, with the policy numbered as the trainer does, and give the trainer its head.

        Raises FileNotFoundError when neither the trainer nor the spool has the head any more.
        """
        stamped = Versions.parse(text)
        path = engine.folder.policies / f"{stamped.policy}.safetensors"
        if (version := self._versions.get(path, -1)) not in self._trainer.policy_versions:
            with path.open("rb") as file:
                head = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            if head not in self.heads:
                self.heads.append(head)
            version = self._versions[path] = self.heads.index(head)
            if version not in self._trainer.policy_versions:
                self._trainer.set_target_weights(path, version)
        return Versions(version, stamped.drafter)


class Engines:
    """All engines together, as the publisher calls them. Each follows a change of current.json from its next step on."""

    def __init__(self, spool: Spool, intake: Intake):
        self._path, self._intake = spool.current, intake
        self._current: dict[str, Any] = {"version": 0, "on": True}
        self._generated: dict[str, int] = {}

    @property
    def version(self) -> int:
        """The drafter version that was sent last; 0 is the one that the engines start with."""
        return int(self._current["version"])

    def call(self, method: str, *args: Any) -> list[Any]:
        """Switch drafting off for "set_num_speculative_tokens". A host's engines can do nothing else that the publisher asks."""
        if method == "set_num_speculative_tokens":
            self._write(on=False)
        return []

    def update_drafter(
        self, payload: WeightPayload, version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Offer a drafter to the engines, and return at once. `answers` says whether they serve it or refuse it."""
        path = self._path.with_name(f"{version}.safetensors")
        os.replace(payload.path, path)
        for old in {*self._path.parent.glob("*.safetensors")} - {
            path,
            self._path.with_name(f"{self.version}.safetensors"),
        }:
            old.unlink()
        self._generated = {name: e.state.get("generated_tokens", 0) for name, e in self._intake.engines.items()}
        self._write(version=version, path=str(path), digests=payload.digests, expected_rates=expected_rates)
        return SwapReport(0.0, payload.num_bytes)

    def answers(self) -> tuple[list[str], bool]:
        """Return why engines refuse the last drafter, and whether all that have worked since serve it (False if none does)."""
        live = {name: engine.state for name, engine in self._intake.engines.items() if engine.lives and engine.state}
        refused = [why for state in live.values() if (why := state["refused"].get(str(self.version))) is not None]
        served = {name: state["drafter_version"] == self.version for name, state in live.items()}
        idle = {n for n, state in live.items() if state.get("generated_tokens", 0) == self._generated.get(n, 0)}
        return refused, any(served.values()) and all(served[name] or name in idle for name in live)

    def _write(self, **changes: Any) -> None:
        self._current |= changes
        write_json(self._path, self._current)
