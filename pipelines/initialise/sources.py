"""The text of `cotrain init`: where it comes from, how it is stored, and what of it is held out.

The first row of a run's rollouts.jsonl describes the policy and its sampling. Every other row is one part of the rollouts.
A row that was cut off is not read, so a part is either complete or absent.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.config.schema import DatasetRollouts, RecordedRollouts, RolloutConfig, RunConfig
from cotrain.records import RolloutRequest, derived_seed
from cotrain.run.rows import RowFile, read_rows
from cotrain.tasks.base import Task, build_task
from cotrain.tasks.prompts import PromptOrder, encode_prompt, load_tokenizer

FILE = "rollouts.jsonl"


@dataclass(frozen=True, slots=True)
class StoredRollout:
    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]  # the response, including the end-of-sequence token when there is one

    @property
    def sequence(self) -> tuple[list[int], int]:
        """All tokens, and how many of them are the prompt's."""
        return self.prompt_token_ids + self.token_ids, len(self.prompt_token_ids)


class Corpus(RowFile):
    """rollouts.jsonl of one run, to which parts are appended."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Open the file of a run folder; `about` becomes its first row when it is new."""
        rows = read_rows(folder / FILE)
        super().__init__(folder / FILE, resumed_step=len(rows))
        if not rows:
            self.write(0, about)
        self.about, *self._parts = rows or [about]
        self.rollouts = _rollouts(self._parts)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    def append(self, rollouts: Sequence[StoredRollout]) -> None:
        """Write one more part. Raises OSError when the disk is full; the earlier parts stay intact then."""
        part = {"rollouts": [asdict(rollout) for rollout in rollouts]}
        self.write(len(self._parts) + 1, part)
        self._parts.append(part)
        self.rollouts += rollouts

    def fingerprint(self) -> str:
        """blake2b over the token ids of all rollouts, in order."""
        token_ids = [[rollout.prompt_token_ids, rollout.token_ids] for rollout in self.rollouts]
        return hashlib.blake2b(json.dumps(token_ids).encode(), digest_size=8).hexdigest()


def _rollouts(parts: Sequence[dict[str, Any]]) -> list[StoredRollout]:
    return [StoredRollout(**rollout) for part in parts for rollout in part["rollouts"]]


def read_recorded(path: str, limits: RolloutConfig, wanted: dict[str, Any]) -> list[StoredRollout]:
    """The rollouts in the run folder of an earlier `cotrain init` of the same policy. Prints a note if their sampling differs.

    limits: the longest prompt and response. wanted: the first row of the new run's file.

    Raises ValueError naming init.source.path when there are none, or they are of another policy or tokenizer, or too long.
    """
    about, *parts = read_rows(Path(path).expanduser() / FILE) or [{}]
    if not parts:
        raise ValueError(
            f"init.source.path: {path} is no run folder of a `cotrain init` with a complete part of {FILE}; finish that "
            'run with --resume, or collect rollouts with init.source.type = "policy"'
        )
    if about["fingerprints"] != wanted["fingerprints"]:
        raise ValueError(
            f"init.source.path: {path}: rollouts of another policy or tokenizer (they were made with {about['policy']}); "
            "set policy.model to that one, or collect new rollouts"
        )
    if about["sampling"] != wanted["sampling"]:
        print(f"note: the rollouts were sampled with {about['sampling']}, [rollout] has {wanted['sampling']}")
    rollouts = _rollouts(parts)
    prompt, response = (max(len(getattr(r, ids)) for r in rollouts) for ids in ("prompt_token_ids", "token_ids"))
    if prompt > limits.max_prompt_tokens or response > limits.max_new_tokens:
        raise ValueError(
            f"init.source.path: {path} has prompts of {prompt} tokens and responses of {response}; raise "
            "rollout.max_prompt_tokens and max_new_tokens to these"
        )
    return rollouts


def split(rollouts: list[StoredRollout], samples: int) -> tuple[list[StoredRollout], list[StoredRollout]]:
    """Hold out the last tenth of the rollouts, as whole prompts of so many samples and at most HELD_OUT rollouts.

    Raises ValueError naming init.tokens when none is left to train on.
    """
    held = max(1, min(HELD_OUT, len(rollouts) // 10) // samples) * samples
    if held >= len(rollouts):
        raise ValueError(f"init.tokens: {len(rollouts)} rollouts are too few to hold some out; raise it")
    return rollouts[:-held], rollouts[-held:]


PART_ROLLOUTS, HELD_OUT = 128, 128
"""Most rollouts of one part on disk, which a crash can lose, and most that are held out."""


@dataclass(frozen=True)
class PromptStream:
    """An endless series of prompts in seeded order. Once all are used, they come again in another order, with new samples."""

    task: Task
    tokenizer: Any
    config: RunConfig

    def requests(self, first: int, count: int) -> list[RolloutRequest]:
        """The requests for all samples of prompts `first` to `first + count - 1` of the series."""
        seed, rollout = self.config.seed, self.config.rollout
        order, requests = PromptOrder(len(self.task), 1, seed), []
        for number in range(first, first + count):
            prompt = self.task.prompt(order.step(number + 1)[0])
            token_ids = encode_prompt(self.tokenizer, prompt, rollout.max_prompt_tokens)
            first_sample = number // len(self.task) * rollout.samples_per_prompt
            for sample in range(first_sample, first_sample + rollout.samples_per_prompt):
                requests.append(RolloutRequest(prompt.id, sample, token_ids, derived_seed(seed, 0, prompt.id, sample)))
        return requests


Source = PromptStream | list[StoredRollout]
"""Prompts that the policy answers, or rollouts that an earlier `cotrain init` has collected."""


def open_source(config: RunConfig, model: Path, about: dict[str, Any]) -> Source:
    """Open and check the source that [init.source] names, and print notes on it. Raises ValueError naming its field.

    about: the first row of the run's file.
    """
    source = config.init.source
    if isinstance(source, RecordedRollouts):
        return read_recorded(source.path, config.rollout, about)
    data = source if isinstance(source, DatasetRollouts) else config.task
    task = build_task(data, config.seed, model, config.rollout.max_prompt_tokens)
    if task.left_out:
        print(f"note: left out {task.left_out}")
    return PromptStream(task, load_tokenizer(model), config)
