"""The engines of a host as the trainer sees them: what they leave in the spool, and the one file that they follow."""

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
    """One engine of the host, as it has last described itself."""

    folder: EngineFolder
    facts: dict[str, Any]
    state: dict[str, Any]

    @property
    def lives(self) -> bool:
        """Does its process live, with a worker that can draft?"""
        return self.facts["attached"] and Path(f"/proc/{self.facts['pid']}").exists()


class Intake:
    """Reads and deletes shards. The trainer's policy versions count the different heads of all engines."""

    def __init__(self, spool: Spool, trainer: DrafterTrainer, most_drafted: int, heads: list[str]):
        """most_drafted: draft tokens in a verification step. heads: digests of the policy versions known so far."""
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
            is_gone = engine.facts["attached"] and not engine.lives  # asked first: its last shards are complete then
            for shard in engine.folder.shards():
                self._take(name, engine, shard)
            if is_gone:
                shutil.rmtree(engine.folder.facts.parent, ignore_errors=True)
                del self.engines[name]

    def take(self) -> RolloutBatch:
        """All rollouts that wait, with their records, and how the engines worked meanwhile. There must be some."""
        rollouts, records = map(list, zip(*self.waiting, strict=True))
        counts, num_tokens = total_counts(r.speculation for r in rollouts), sum(len(r.token_ids) for r in rollouts)
        batch = RolloutBatch(rollouts, records, counts, max(self._seconds.values()), num_tokens, gain=self._gain)
        self.waiting, self._gain = [], GainReport()
        self._seconds.clear()
        return batch

    def metrics(self) -> dict[str, float]:
        """What the engines that are there have counted since they started, and the rollouts that were dropped."""
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
        """The rollout and its record under the trainer's policy versions; nothing where the head is gone."""
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
        """What an engine has stamped, with the trainer's number of its policy, whose head the trainer has then.

        Raises FileNotFoundError when nobody has the head any more.
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
    """All engines together as the publisher calls them: they follow current.json, each from its next step on."""

    def __init__(self, spool: Spool, intake: Intake):
        self._path, self._intake = spool.current, intake
        self._current: dict[str, Any] = {"version": 0, "on": True}
        self._generated: dict[str, int] = {}

    @property
    def version(self) -> int:
        """What was sent last; 0 is what the engines start with."""
        return int(self._current["version"])

    def call(self, method: str, *args: Any) -> list[Any]:
        """Switch drafting off. Nothing else that the publisher asks can be asked of a host's engines."""
        if method == "set_num_speculative_tokens":
            self._write(on=False)
        return []

    def update_drafter(
        self, payload: WeightPayload, version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Begin to send a drafter; `answers` says what has become of it."""
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
        """Why engines refuse what was sent last, and whether each that has worked since then serves it."""
        live = {name: engine.state for name, engine in self._intake.engines.items() if engine.lives and engine.state}
        refused = [why for state in live.values() if (why := state["refused"].get(str(self.version))) is not None]
        served = {name: state["drafter_version"] == self.version for name, state in live.items()}
        idle = {n for n, state in live.items() if state.get("generated_tokens", 0) == self._generated.get(n, 0)}
        return refused, any(served.values()) and all(served[name] or name in idle for name in live)

    def _write(self, **changes: Any) -> None:
        self._current |= changes
        write_json(self._path, self._current)
