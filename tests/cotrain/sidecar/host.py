"""A host with one engine, simulated: rollouts of a tiny model, the drafter that the spool tells to serve, real shards.

It drafts with the drafter's real weights and accepts as rejection sampling does, so that what is served follows from them.
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from safetensors.torch import load_file, save_file

from cotrain.records import GainReport
from cotrain.trainer.buffer import pack
from cotrain.trainer.trainer import read_target_weights
from cotrain.transport.features import FeatureRecord, write_records
from cotrain.transport.spool import Description, EngineFolder, Finished, Offer, Spool, State, read_json, write_json
from drafters.base import TargetSpec
from drafters.build import load_drafter
from drafters.losses import acceptances
from tests.cotrain.trainer.conftest import Target

K = 2


@dataclass
class Host:
    """One engine, which lives as long as this object does, or with `process` as long as a process of its own."""

    spool: Spool
    target: Target
    name: str = "e0"
    process: subprocess.Popen | None = None
    refuses: tuple[int, ...] = ()
    """Versions that it does not take."""
    is_deaf: bool = False
    """No draft token is accepted, as with a drafter whose cache holds no numbers."""
    drafter_version: int = 0
    policy_version: int = 0
    generated: int = 0
    finished: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of requests that were not tapped, by reason."""
    seconds_without: float = 0.6
    """What a wave would have taken without speculation, which took 0.5 s."""

    def __post_init__(self) -> None:
        self.engine: EngineFolder = self.spool.join(self.name) if self.process is None else self.spool.engine(self.name)
        self.refused: dict[int, str] = {}
        self.taken: tuple[int, dict | None] = (0, None)
        self.drafter = load_drafter(self.spool.initial, TargetSpec.from_pretrained(self.target.folder))
        self.rng = torch.Generator().manual_seed(7)
        self.on = True
        self.new_policy(0)
        self.report()

    def new_policy(self, version: int, moves: bool = False) -> None:
        """The head of the target again, as with a policy whose head is frozen, or another one."""
        self.policy_version = version
        known, file = self.target.folder / "model.safetensors", self.engine.policies / f"{version}.safetensors"
        if moves:
            save_file({n: t + 1e-3 * version if t.dim() == 2 else t for n, t in load_file(known).items()}, file)
        elif not file.exists():
            os.link(known, file)

    def report(self) -> None:
        counts = Counter(finished=self.finished, tapped=1, generated_tokens=self.generated)
        state = State(1, None, "0.32.0", "float32", self.policy_version, self.drafter_version, self.refused)
        write_json(
            self.engine.state, replace(state, dropped=Counter(self.left_out), seconds={"tap": 0.1}, counts=counts)
        )

    @property
    def has_news(self) -> bool:
        """Does the trainer offer another drafter than the one that was taken last?"""
        offer = read_json(self.spool.current, Offer)
        return offer is not None and (offer.version, offer.digests) != self.taken

    def follow(self) -> None:
        """Before a step: what current.json says."""
        offer = read_json(self.spool.current, Offer)
        if offer is None:
            return
        self.on = offer.on
        if self.has_news:
            self.taken = offer.version, offer.digests
            if offer.version in self.refuses:
                self.refused[offer.version] = "fc.weight has non-finite values"
            else:
                self.drafter_version = offer.version
                self.drafter.load_state_dict(load_file(offer.path), strict=False)

    def wave(self, seed: int, prompts: int = 16, samples: int = 1, **sampling: float) -> float:
        """One shard of rollouts. Returns the acceptance length."""
        self.follow()
        records = self.target.rollouts(prompts, samples, seed, self.policy_version)
        records = [
            replace(r, drafter_version=self.drafter_version, sampling=replace(r.sampling, **sampling)) for r in records
        ]
        told = [self._told(record, steps) for record, steps in zip(records, self._verified(records), strict=True)]
        self.generated += 20 * len(records)
        self.finished += len(records)
        drafted = sum(len(one.verification_steps) for one in told)
        gain = GainReport(seconds=0.5, seconds_without=self.seconds_without, longest_draft=K if self.on else 0)
        described = Description(told, [gain])
        assert self.engine.add_shard(partial(write_records, records=records), described, 0, 2**30) is None
        self.report()
        return 1 + sum(a for one in told for _, a in one.verification_steps) / max(1, drafted)

    def _told(self, record: FeatureRecord, steps: list[tuple[int, int]]) -> Finished:
        return Finished("r", record.prompt_length, "length", tuple(steps))

    def _verified(self, records: list[FeatureRecord]) -> list[list[tuple[int, int]]]:
        """(drafted, accepted) of each verification step of each rollout; none while drafting is off."""
        if not self.on:
            return [[] for _ in records]
        head = read_target_weights(
            self.target.folder, self.policy_version, TargetSpec.from_pretrained(self.target.folder), "cpu"
        )
        rows, sampling = pack(records)
        starts = acceptances([self.drafter], rows, head, sampling)[0]
        drawn = {
            (int(r), int(o)): starts.drawn[:, i]
            for i, (r, o) in enumerate(zip(starts.rollout, starts.offset, strict=True))
        }
        found = []
        for rollout, record in enumerate(records):
            offset, steps = 0, []
            while (rollout, offset) in drawn:
                chances = drawn[rollout, offset].nan_to_num(0.0)[:K]
                hits = torch.rand(len(chances), generator=self.rng) < (0.0 if self.is_deaf else chances)
                steps.append((K, int(hits.cumprod(0).sum())))
                offset += 1 + steps[-1][1]
            if 1 + sum(1 + a for _, a in steps) < record.num_tokens - record.prompt_length:
                steps.append((K, 0))
            found.append(steps)
        return found


def living(spool: Spool, name: str) -> subprocess.Popen:
    """A process by whose life an engine lives, and which can be killed."""
    code = "import sys; from cotrain.transport.spool import Spool; kept = Spool(sys.argv[1]).join(sys.argv[2])"
    command = [
        sys.executable,
        "-c",
        f"{code}; print(flush=True); sys.stdin.read()",
        str(spool.folder),
        name,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process
