"""Rollouts as token ids on disk, from which a drafter is initialised, and their split into training and hold-out.

rollouts.jsonl of a run has a first row on the policy and its sampling, then a row for each part of the rollouts. A row
that was cut off is not read, so that a part is complete or not there.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.run.rows import RowFile, read_rows

FILE = "rollouts.jsonl"


@dataclass(frozen=True, slots=True)
class StoredRollout:
    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The response, including the end-of-sequence token when there is one."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


Split = tuple[list[StoredRollout], list[StoredRollout]]
"""Rollouts to train on, and those held out."""


class Corpus(RowFile):
    """rollouts.jsonl of one run, to which parts are appended."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Open the file of a run folder; `about` becomes its first row when it is new."""
        rows = read_rows(folder / FILE)
        super().__init__(folder / FILE, resumed_step=len(rows))
        if not rows:
            self.write(0, about)
        self.about, *parts = rows or [about]
        self.rollouts, self.num_parts = _rollouts(parts), len(parts)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    def append(self, rollouts: Sequence[StoredRollout]) -> None:
        """Write one more part. Raises OSError when the disk is full; the parts before it are then as they were."""
        self.write(self.num_parts + 1, {"rollouts": [asdict(rollout) for rollout in rollouts]})
        self.rollouts += rollouts
        self.num_parts += 1


def _rollouts(parts: Sequence[dict[str, Any]]) -> list[StoredRollout]:
    return [StoredRollout(**rollout) for part in parts for rollout in part["rollouts"]]


def read_recorded(run: str, fingerprints: dict[str, str]) -> tuple[list[StoredRollout], dict[str, Any]]:
    """The rollouts in the run folder of an earlier `cotrain init` of the same policy, and the first row of its file.

    Raises ValueError naming init.source.path when there are none, or they are of another policy or tokenizer.
    """
    about, *parts = read_rows(Path(run).expanduser() / FILE) or [{}]
    if not parts:
        raise ValueError(
            f"init.source.path: {run} is no run folder of a `cotrain init` with a complete part of {FILE}; finish that "
            'run with --resume, or collect rollouts with init.source.type = "policy"'
        )
    if about["fingerprints"] != fingerprints:
        raise ValueError(
            f"init.source.path: {run}: rollouts of another policy or tokenizer (they were made with {about['policy']}); "
            "set policy.model to that one, or collect new rollouts"
        )
    return _rollouts(parts), about


def split_prompts(rollouts: Sequence[StoredRollout], share: float, seed: int) -> Split:
    """Split by whole prompts; about `share` of the prompts, and at least one, is held out.

    Prompts are told apart by their tokens. Raises ValueError naming init.holdout when none is left to train on.
    """
    prompts = sorted({tuple(rollout.prompt_token_ids) for rollout in rollouts})
    count = max(1, round(share * len(prompts)))
    if count >= len(prompts):
        raise ValueError(
            f"init.holdout: {count} of {len(prompts)} prompts held out leaves none to train on; lower it, or raise "
            "init.tokens or the number of prompts"
        )
    held = set(random.Random(seed).sample(prompts, count))
    training = [rollout for rollout in rollouts if tuple(rollout.prompt_token_ids) not in held]
    return training, [rollout for rollout in rollouts if tuple(rollout.prompt_token_ids) in held]


def data_fingerprint(rollouts: Iterable[StoredRollout]) -> str:
    """blake2b over the token ids of all rollouts, in order."""
    token_ids = [[rollout.prompt_token_ids, rollout.token_ids] for rollout in rollouts]
    return hashlib.blake2b(json.dumps(token_ids).encode(), digest_size=8).hexdigest()
