"""The engines of a host as the trainer sees them: what they leave in the spool, and the one file that they follow."""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from cotrain.records import GainReport, Rollout, RolloutBatch, Segment, SwapReport, Versions, WeightPayload
from cotrain.rollout.acceptance_stats import counts_of_steps, total_counts
from cotrain.sidecar.spool import EngineFolder, Spool, read_json, write_json
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, read_shard


@dataclass
class Engine:
    """One engine of the host, as it has last described itself."""

    folder: EngineFolder
    facts: Mapping[str, Any]
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Does its process live, with a worker that can draft?"""
        return bool(self.facts["attached"]) and Path(f"/proc/{self.facts['pid']}").exists()


class Intake:
    """Reads and deletes shards. The trainer's policy versions count the different heads of all engines."""

    def __init__(self, spool: Spool, trainer: DrafterTrainer, most_drafted: int, heads: list[str]):
        """most_drafted: draft tokens in a verification step. heads: digests of the policy versions known so far."""
        self._spool, self._trainer, self._most, self.heads = spool, trainer, most_drafted, heads
        self.engines: dict[str, Engine] = {}
        self.waiting: list[tuple[Rollout, FeatureRecord]] = []
        self._dropped, self._seconds = 0, Counter[str]()
        self._versions: dict[Path, int] = {}
        self._gain = GainReport()

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
        """What the engines that are there have counted since they started."""
        states = [engine.state for engine in self.engines.values()]
        metrics = {"engines": len(states), "dropped": self._dropped, "tapped": 0, "hooks_off": 0}
        for state in states:
            metrics["tapped"] += state.get("tapped", 0)
            metrics["hooks_off"] += len(state.get("hooks_off", ()))
            metrics["dropped"] += sum(state.get("dropped", {}).values())
            for part, seconds in state.get("seconds", {}).items():
                metrics[f"{part}_s"] = metrics.get(f"{part}_s", 0) + seconds
        return {f"sidecar/{name}": float(value) for name, value in metrics.items()}

    def _take(self, name: str, engine: Engine, shard: Path) -> None:
        described = read_json(shard.with_suffix(".json"))
        for window in described["windows"]:
            self._gain += GainReport(**window["gain"])
            self._seconds[name] += sum(seconds for *_, seconds in window["steps"])
        for told, record in zip(described["rollouts"], self._records(shard), strict=False):
            self.waiting += self._one(engine, told, record)
        shard.with_suffix(".json").unlink()
        shard.unlink(missing_ok=True)

    def _records(self, shard: Path) -> list[FeatureRecord]:
        with suppress(ValueError):
            return read_shard(shard)
        self._dropped += 1  # broken
        return []

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
        tokens, steps = record.token_ids.tolist(), [(drafted, taken) for drafted, taken in told["verification_steps"]]
        prompt, response = tokens[: record.prompt_length], tokens[record.prompt_length :]
        texts = record.prompt_key, len(self.waiting), prompt, response, [], "", told["finish_reason"]
        counts = counts_of_steps(steps, self._most)
        rollout = Rollout(*texts, versions, counts, tuple(steps), tuple(earlier))
        yield rollout, replace(record, policy_version=versions.policy)

    def _stamped(self, engine: Engine, text: str) -> Versions:
        """What an engine has stamped, under the trainer's number of its policy. Raises FileNotFoundError as below."""
        versions = Versions.parse(text)
        return replace(versions, policy=self._policy(engine.folder.policies / f"{versions.policy}.safetensors"))

    def _policy(self, path: Path) -> int:
        """The version of this head, which the trainer has then. Raises FileNotFoundError when nobody has it any more."""
        version = self._versions.get(path, -1)
        if version not in self._trainer.policy_versions:
            with path.open("rb") as file:
                head = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            if head not in self.heads:
                self.heads.append(head)
            version = self._versions[path] = self.heads.index(head)
            if version not in self._trainer.policy_versions:
                self._trainer.set_target_weights(path, version)
        return version


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
        for old in self._path.parent.glob("*.safetensors"):
            if old.stem not in (str(version), str(self.version)):
                old.unlink()
        self._generated = {
            name: engine.state.get("generated_tokens", 0) for name, engine in self._intake.engines.items()
        }
        self._write(version=version, path=str(path), digests=payload.digests, expected_rates=expected_rates)
        return SwapReport(0.0, payload.num_bytes)

    def answers(self) -> tuple[list[str], bool]:
        """Why engines refuse what was sent last, and whether each that has worked since then serves it."""
        live = {name: engine.state for name, engine in self._intake.engines.items() if engine.lives}
        refused = [
            state["refused"][str(self.version)] for state in live.values() if str(self.version) in state["refused"]
        ]
        has = [state.get("drafter_version") == self.version for state in live.values()]
        works = [state.get("generated_tokens", 0) != self._generated.get(name, 0) for name, state in live.items()]
        return refused, any(has) and all(h or not w for h, w in zip(has, works, strict=True))

    def _write(self, **changes: Any) -> None:
        self._current |= changes
        write_json(self._path, self._current)
