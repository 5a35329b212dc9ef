"""The engines of a host as the trainer sees them: it reads what they write to the spool, and they follow its current.json."""

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from cotrain.acceptance_stats import counts_of
from cotrain.records import GainReport, Rollout, RolloutBatch, SwapReport, Versions, WeightPayload
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, read_shard
from cotrain.transport.spool import Description, EngineFolder, Finished, Offer, Spool, State, read_json, write_json
from cotrain.weights.versions import CurrentWeights

KNOWN_HEADS = 64  # most policy heads whose versions are remembered; one that comes back later counts as a new policy


class Intake:
    """Reads and deletes shards. The trainer's policy versions number the distinct output heads of all engines."""

    def __init__(self, spool: Spool, trainer: DrafterTrainer, heads: dict[str, int]):
        """heads: policy version by the digest of its head."""
        self._spool, self._trainer, self.heads = spool, trainer, heads
        self.engines: dict[str, State] = {}  # what all living engines have last said of themselves
        self.problems: list[str] = []  # what could not be read in the last `poll`
        self.waiting: list[tuple[Rollout, FeatureRecord]] = []
        self._gain, self._left_out, self._said = GainReport(), Counter[str](), Counter[str]()  # see `left_out`
        self._versions: dict[Path, int] = {}
        self._counted = Counter[str]()  # of all engines, at the last `by_adapter`

    def poll(self) -> None:
        """Take in what has come since the last call, and forget engines that have ended."""
        self.problems = []
        for folder in self._spool.engines():
            name, lives = folder.folder.name, folder.is_held  # checked first: the last shards are then complete
            try:
                if state := read_json(folder.state, State):
                    self.engines[name] = state
            except ValueError as error:
                self.problems.append(f"engine {name} is left out: {error}")
            for shard in folder.shards():
                self._take(name, folder, shard)
            if not lives and folder.state.exists():
                shutil.rmtree(folder.folder, ignore_errors=True)
                if name in self.engines:
                    self._left_out += _left_out(self.engines.pop(name))

    def take(self, seconds: float) -> RolloutBatch:
        """Hand over all waiting rollouts (at least one), which came in so many seconds, and what was gained meanwhile."""
        rollouts, records = map(list, zip(*self.waiting, strict=True))
        counts, num_tokens = counts_of(rollouts), sum(len(r.token_ids) for r in rollouts)
        batch = RolloutBatch(rollouts, records, seconds, num_tokens, gain=self._gain, speculation=counts)
        self.waiting, self._gain, self._said = [], GainReport(), self.left_out()
        return batch

    def left_out(self) -> Counter[str]:
        """Return the number of requests that could not be trained on, by reason, and of all that have `finished`."""
        return sum(map(_left_out, self.engines.values()), self._left_out)

    def by_adapter(self) -> dict[str, float]:
        """Return the acceptance length since the last call by adapter; "base" is that of requests without one. Empty without adapters."""
        counts = sum((state.counts for state in self.engines.values()), Counter[str]())
        new, self._counted = counts - self._counted, counts
        lengths = dict[str, float]()
        for key, drafts in new.items():
            if (name := key.removeprefix("drafts/")) != key:
                lengths[re.sub(r"[^\w.-]", "_", name) or "base"] = 1 + new[f"accepted/{name}"] / drafts
        return lengths

    def in_words(self, of_all: bool = False) -> str:
        """Say how many requests were left out since the last `take`, or of all, and why; nothing if none were."""
        reasons = self.left_out() if of_all else self.left_out() - self._said
        finished = reasons.pop("finished", 0)
        listed = ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
        return f"{reasons.total()} of {max(finished, reasons.total())} requests left out: {listed}" if reasons else ""

    def _take(self, name: str, folder: EngineFolder, shard: Path) -> None:
        number, described = 1, shard.with_suffix(".json")
        try:
            rollouts, gains = read_json(described, Description) or Description([], [])
            number = len(rollouts)
            pairs = zip(rollouts, read_shard(shard), strict=True)
            self.waiting += [rollout for finished, record in pairs for rollout in self._one(folder, finished, record)]
            self._gain = sum(gains, self._gain)
        except ValueError as error:
            self._left_out["their shard could not be read"] += number
            self.problems.append(f"a shard of engine {name} could not be read: {error!r}")
        described.unlink()
        shard.unlink(missing_ok=True)

    def _one(
        self, folder: EngineFolder, finished: Finished, record: FeatureRecord
    ) -> list[tuple[Rollout, FeatureRecord]]:
        """Return the rollout and its record with the trainer's policy versions, or nothing if the head of one is gone."""
        last = Versions(record.policy_version, record.drafter_version)
        try:
            earlier = [s._replace(versions=self._numbered(folder, s.versions)) for s in finished.earlier]
            versions = self._numbered(folder, last)
        except FileNotFoundError:
            self._left_out["their policy is too old"] += 1
            return []
        tokens, split = record.token_ids.tolist(), record.prompt_length
        rollout = Rollout(
            record.prompt_key, 0, tokens[:split], tokens[split:], [], "", finished.finish_reason, versions,
            finished.verification_steps, tuple(earlier),
        )  # fmt: skip
        return [(rollout, replace(record, policy_version=versions.policy))]

    def _numbered(self, folder: EngineFolder, stamped: Versions) -> Versions:
        """Return an engine's versions with the policy numbered as the trainer does, and give the trainer its head.

        Raises FileNotFoundError when neither the trainer nor the spool has the head any more.
        """
        path = folder.policies / f"{stamped.policy}.safetensors"
        if self._versions.get(path) not in self._trainer.target_weights:
            with path.open("rb") as file:
                head = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
                version = self.heads.setdefault(head, max(self.heads.values(), default=-1) + 1)
                self.heads = dict(list(self.heads.items())[-KNOWN_HEADS:])
                if version not in self._trainer.target_weights:
                    # By its descriptor: the engine removes old heads, perhaps at this moment.
                    self._trainer.set_target_weights(f"/proc/self/fd/{file.fileno()}", version)
            known = {p: v for p, v in self._versions.items() if v in self._trainer.target_weights}
            self._versions = known | {path: version}
        return replace(stamped, policy=self._versions[path])


def _left_out(state: State) -> Counter[str]:
    return state.dropped + Counter(finished=state.counts["finished"])


class Engines:
    """All engines together, as the publisher calls them. Each follows a change of current.json from its next step on."""

    def __init__(self, spool: Spool, intake: Intake, current: CurrentWeights, inherits: bool):
        """inherits: whether engines live that may serve a drafter of an earlier trainer."""
        self._path, self._intake, self._offer, self.current = spool.current, intake, Offer(), current
        self.version = None if inherits else 0
        """The drafter version that all engines were sent; 0 is the one that they start with. None if some may have another."""
        self._generated: dict[str, int] = {}

    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        """Switch drafting off, which is all that the publisher asks for."""
        self._write(replace(self._offer, on=False))

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
        for old in {*self._path.parent.glob("*.safetensors")} - {path, Path(self._offer.path)}:
            old.unlink()
        self._generated = {name: state.counts["generated_tokens"] for name, state in self._intake.engines.items()}
        self.version, rates = version, None if expected_rates is None else list(expected_rates)
        self._write(Offer(version, self._offer.on, str(path), payload.digests, rates))
        self.current.record_drafter(payload, version)
        return SwapReport(0.0, payload.num_bytes)

    def answers(self) -> tuple[list[str], bool]:
        """Return why engines refuse the last drafter, and whether all that have worked since serve it (False if none does)."""
        live = {name: state for name, state in self._intake.engines.items() if state.reason is None}
        refused = [state.refused[self.version] for state in live.values() if self.version in state.refused]
        served = {name: state.drafter_version == self.version for name, state in live.items()}
        idle = {n for n, state in live.items() if state.counts["generated_tokens"] == self._generated.get(n, 0)}
        return refused, any(served.values()) and all(served[name] or name in idle for name in live)

    def _write(self, offer: Offer) -> None:
        self._offer = offer
        write_json(self._path, offer)
