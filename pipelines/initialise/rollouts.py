"""Rollouts on disk, as token ids: what a drafter is initialised from.

rollouts/
  corpus.json          which policy they are of, how they were sampled
  part_00000.jsonl     one rollout a line; a part is complete or not there
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.config.files import write_json
from cotrain.run.checkpoint import is_disk_full

ABOUT = "corpus.json"
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One rollout of the corpus."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The response, including the end-of-sequence token when there is one."""
    finish_reason: str
    """stop or length."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_token_ids) + len(self.token_ids)


class Corpus:
    """The rollouts/ folder of one run, to which parts are appended."""

    def __init__(self, folder: Path) -> None:
        """Open a folder that may be new. Raises ValueError naming a part that cannot be read."""
        self.folder = folder
        parts = sorted(folder.glob("part_*.jsonl"))
        self.rollouts = [rollout for part in parts for rollout in _read_part(part)]
        self.num_parts = len(parts)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    def describe(self, about: dict[str, Any]) -> None:
        """Write corpus.json; `about` must hold the policy's `fingerprints` and the `sampling`."""
        self.folder.mkdir(exist_ok=True)
        write_json(self.folder / ABOUT, about)

    def append(self, rollouts: Sequence[StoredRollout]) -> None:
        """Write one more part. Raises OSError when the disk is full; the parts before it are then as they were."""
        path = self.folder / f"part_{self.num_parts:05d}.jsonl"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("w") as file:
                file.writelines(json.dumps(asdict(rollout), separators=(",", ":")) + "\n" for rollout in rollouts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not is_disk_full(error, self.folder):
                raise
            raise OSError(
                errno.ENOSPC,
                f"disk full while writing rollouts to {self.folder}; the parts that were complete are kept. Make room "
                "and continue with --resume",
            ) from error
        self.rollouts += rollouts
        self.num_parts += 1


def _read_part(path: Path) -> list[StoredRollout]:
    try:
        return [StoredRollout(**json.loads(line)) for line in path.read_text().splitlines()]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"rollouts: {path} is damaged ({error}); delete it to collect its rollouts again") from error


def read_recorded(path: str, fingerprints: dict[str, str]) -> tuple[list[StoredRollout], dict[str, Any]]:
    """The rollouts that an earlier `cotrain init` of the same policy has written, and its corpus.json.

    path: its run folder or rollouts/ folder. Raises ValueError naming init.source.path when there is no complete part,
    or the rollouts are of another policy or tokenizer.
    """
    folder = Path(path).expanduser()
    folder = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    if not (folder / ABOUT).is_file():
        what = "no rollouts folder" if folder.is_dir() else "no such folder"
        raise ValueError(
            f"init.source.path: {path}: {what} of a `cotrain init` (no {ABOUT}); give its run folder, or collect "
            'rollouts first with init.source.type = "policy"'
        )
    about = json.loads((folder / ABOUT).read_text())
    for kind, theirs in about["fingerprints"].items():
        if theirs != fingerprints[kind]:
            raise ValueError(
                f"init.source.path: {path}: rollouts of another policy (its {kind} differs from policy.model; they "
                f"were made with {about.get('policy', 'an unnamed model')}); set policy.model to that one, or collect "
                "new rollouts"
            )
    rollouts = Corpus(folder).rollouts
    if not rollouts:
        raise ValueError(f"init.source.path: {path}: no complete part (part_*.jsonl); finish that run with --resume")
    return rollouts, about


def split_prompts(
    rollouts: Sequence[StoredRollout], share: float, seed: int
) -> tuple[list[StoredRollout], list[StoredRollout]]:
    """(training, hold-out), by whole prompts; about `share` of the prompts, and at least one, is held out.

    Prompts are told apart by their tokens. Raises ValueError naming init.holdout when one side would be empty.
    """
    keys = sorted({_prompt_key(rollout) for rollout in rollouts})
    if len(keys) < 2:
        raise ValueError(
            f"init.holdout: the rollouts have {len(keys)} prompt(s), and whole prompts are held out; raise init.tokens "
            "or the number of prompts"
        )
    count = max(1, round(share * len(keys)))
    if count >= len(keys):
        raise ValueError(
            f"init.holdout: {share:g} of {len(keys)} prompts leaves none to train on; lower it or raise init.tokens"
        )
    held = set(sorted(keys, key=lambda key: hashlib.blake2b(f"{seed}/".encode() + key).digest())[:count])
    training = [rollout for rollout in rollouts if _prompt_key(rollout) not in held]
    return training, [rollout for rollout in rollouts if _prompt_key(rollout) in held]


def data_fingerprint(rollouts: Iterable[StoredRollout]) -> str:
    """blake2b over the token ids of all rollouts, in order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for rollout in rollouts:
        digest.update(json.dumps([rollout.prompt_token_ids, rollout.token_ids]).encode())
    return digest.hexdigest()


def _prompt_key(rollout: StoredRollout) -> bytes:
    return hashlib.blake2b(json.dumps(rollout.prompt_token_ids).encode(), digest_size=DIGEST_BYTES).digest()
