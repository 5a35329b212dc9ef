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

from cotrain.acceptance_stats import counts_of_steps, total_counts
from cotrain.records import GainReport, Rollout, RolloutBatch, Segment, SwapReport, Versions, WeightPayload
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, read_shard
from cotrain.transport.spool import EngineFolder, Spool, read_json, write_json
from cotrain.weights.versions import CurrentWeights

KNOWN_HEADS = 64
"""Most policy heads whose version numbers are remembered. A head that comes back later counts as a new policy."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
"""What is raised by using the content of a file that no engine of ours has written."""
FACTS: dict[str, Any] = {"attached": True, "host": "", "pid": 0}
STATE: dict[str, Any] = {"drafter_version": 0, "refused": {}, "dropped": {}, "hooks_off": [], "seconds": {}}
"""Some of what an engine writes, with values of the same types."""


class Engine(NamedTuple):
    """One engine of the host, as it last described itself."""

    facts: dict[str, Any]
    state: dict[str, Any]

    @property
    def left_out(self) -> Counter[str]:
        """Number of its requests of which nothing was passed on, by reason, and of all that have `finished`."""
        return Counter(self.state.get("dropped", {}), finished=self.state.get("finished", 0))


class Intake:
    """Reads and deletes shards. The trainer's policy versions number the distinct output heads of all engines."""

    def __init__(self, spool: Spool, trainer: DrafterTrainer, most_drafted: int, heads: dict[str, int]):
        """most_drafted: most draft tokens of a verification step. heads: policy version by the digest of its head."""
        self._spool, self._trainer, self._most, self.heads = spool, trainer, most_drafted, heads
        self.engines: dict[str, Engine] = {}
        """All engines that live."""
        self.problems: list[str] = []
        """What could not be read in the last `poll`."""
        self.waiting: list[tuple[Rollout, FeatureRecord]] = []
        self._seconds, self._gain = Counter[str](), GainReport()
        self._left_out = Counter[str]()  # requests, here and in engines that have ended
        self._versions: dict[Path, int] = {}

    def poll(self) -> None:
        """Take in what has come since the last call, and forget engines that have ended."""
        self.problems = []
        for folder in self._spool.engines():
            name, lives = folder.folder.name, folder.is_held  # checked first: the last shards are then complete
            try:
                if facts := read_json(folder.facts, FACTS):
                    self.engines[name] = Engine(facts, read_json(folder.state, STATE) or {})
            except UNREADABLE as error:
                self.problems.append(f"engine {name} is left out: {error}")
            for shard in folder.shards():
                self._take(name, folder, shard)
            if not lives and folder.facts.exists():
                shutil.rmtree(folder.folder, ignore_errors=True)
                if (engine := self.engines.pop(name, None)) is not None:
                    self._left_out.update(engine.left_out)

    def take(self) -> RolloutBatch:
        """Hand over all waiting rollouts (at least one) with their records, and what the engines measured meanwhile."""
        rollouts, records = map(list, zip(*self.waiting, strict=True))
        counts, num_tokens = total_counts(r.speculation for r in rollouts), sum(len(r.token_ids) for r in rollouts)
        batch = RolloutBatch(
            rollouts, records, counts, max(self._seconds.values(), default=0.0), num_tokens, gain=self._gain
        )
        self.waiting, self._gain = [], GainReport()
        self._seconds.clear()
        return batch

    def left_out(self) -> Counter[str]:
        """Return the number of requests that could not be trained on, by reason, and of all that have `finished`."""
        total = self._left_out.copy()
        for engine in self.engines.values():
            total.update(engine.left_out)
        return total

    def in_words(self, since: Counter[str]) -> str:
        """Say how many requests were left out since an earlier result of `left_out`, and why; nothing if none were."""
        reasons = self.left_out() - since
        finished = reasons.pop("finished", 0)
        listed = ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
        return f"{reasons.total()} of {max(finished, reasons.total())} requests left out: {listed}" if reasons else ""

    def metrics(self) -> dict[str, float]:
        """Return what the living engines have counted since they started, and the number of requests left out."""
        states, counts, left_out = [engine.state for engine in self.engines.values()], Counter[str](), self.left_out()
        for state in states:
            counts.update({"tapped": state.get("tapped", 0), "hooks_off": len(state.get("hooks_off", ()))})
            counts.update({f"{part}_s": seconds for part, seconds in state.get("seconds", {}).items()})
        counts.update(engines=len(states), dropped=left_out.total() - left_out["finished"])
        return {f"sidecar/{name}": float(value) for name, value in counts.items()}

    def _take(self, name: str, folder: EngineFolder, shard: Path) -> None:
        told, described = list[Any](), shard.with_suffix(".json")
        try:
            content = read_json(described)
            told = list(content["rollouts"])
            gain = sum((GainReport(**window["gain"]) for window in content["windows"]), GainReport())
            busy = Counter({name: sum(step[-1] for window in content["windows"] for step in window["steps"])})
            slowest = Counter({"a request": max([0.0, *(one["seconds"] for one in told)])})
            pairs = zip(told, read_shard(shard), strict=True)
            taken = [found for one, record in pairs for found in self._one(folder, one, record)]
        except UNREADABLE as error:
            self._left_out["their shard could not be read"] += max(1, len(told))
            self.problems.append(f"a shard of engine {name} could not be read: {error!r}")
        else:
            self._gain += gain
            self._seconds = self._seconds + busy | slowest  # a union takes the larger count
            self.waiting += taken
        described.unlink()
        shard.unlink(missing_ok=True)

    def _one(
        self, folder: EngineFolder, told: dict[str, Any], record: FeatureRecord
    ) -> Iterator[tuple[Rollout, FeatureRecord]]:
        """Yield the rollout and its record with the trainer's policy versions, or nothing if the head of one is gone."""
        try:
            earlier = [Segment(self._stamped(folder, text), *span) for text, *span in told["earlier"]]
            versions = self._stamped(folder, told["versions"])
        except FileNotFoundError:
            self._left_out["their policy is too old"] += 1
            return
        tokens, split = record.token_ids.tolist(), record.prompt_length
        steps = [(drafted, taken) for drafted, taken in told["verification_steps"]]
        rollout = Rollout(
            record.prompt_key, 0, tokens[:split], tokens[split:], [], "", told["finish_reason"], versions,
            counts_of_steps(steps, self._most), tuple(steps), tuple(earlier),
        )  # fmt: skip
        yield rollout, replace(record, policy_version=versions.policy)

    def _stamped(self, folder: EngineFolder, text: str) -> Versions:
        """Return the versions of an engine's stamp, with the policy numbered as the trainer does, and give the trainer its head.

        Raises FileNotFoundError when neither the trainer nor the spool has the head any more.
        """
        stamped = Versions.parse(text)
        path = folder.policies / f"{stamped.policy}.safetensors"
        if (version := self._versions.get(path, -1)) not in self._trainer.policy_versions:
            with path.open("rb") as file:
                head = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
                if head not in self.heads:
                    self.heads[head] = max(self.heads.values(), default=-1) + 1
                    self.heads = dict(list(self.heads.items())[-KNOWN_HEADS:])
                version = self.heads[head]
                if version not in self._trainer.policy_versions:
                    # By its descriptor: the engine removes old heads, perhaps at this moment.
                    self._trainer.set_target_weights(f"/proc/self/fd/{file.fileno()}", version)
            known = {p: v for p, v in self._versions.items() if v in self._trainer.policy_versions}
            self._versions = known | {path: version}
        return Versions(version, stamped.drafter)


class Engines:
    """All engines together, as the publisher calls them. Each follows a change of current.json from its next step on."""

    def __init__(self, spool: Spool, intake: Intake, weights: CurrentWeights):
        self._path, self._intake, self._weights = spool.current, intake, weights
        self._current: dict[str, Any] = {"version": 0, "on": True}
        self._generated: dict[str, int] = {}

    @property
    def version(self) -> int:
        """The drafter version that was sent last; 0 is the one that the engines start with."""
        return int(self._current["version"])

    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        """Switch drafting off, which is all that the publisher asks for."""
        self._write(on=False)

    def served_digests(self, names: list[str], draft: bool) -> list[dict[str, str]]:
        """Return nothing: a host's engines read back each update themselves."""
        return []

    def clear_drafter_cache(self) -> None:
        """Do nothing: a host's cache is its own."""

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
        self._weights.record_drafter(payload, version)
        return SwapReport(0.0, payload.num_bytes)

    def answers(self) -> tuple[list[str], bool]:
        """Return why engines refuse the last drafter, and whether all that have worked since serve it (False if none does)."""
        live = {name: e.state for name, e in self._intake.engines.items() if e.facts["attached"] and e.state}
        refused = [why for state in live.values() if (why := state["refused"].get(str(self.version))) is not None]
        served = {name: state["drafter_version"] == self.version for name, state in live.items()}
        idle = {n for n, state in live.items() if state.get("generated_tokens", 0) == self._generated.get(n, 0)}
        return refused, any(served.values()) and all(served[name] or name in idle for name in live)

    def _write(self, **changes: Any) -> None:
        self._current |= changes
        write_json(self._path, self._current)
