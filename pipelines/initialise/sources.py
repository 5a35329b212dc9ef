"""The text of `cotrain init`: the prompts that the policy answers, how its answers are stored, and what of them is held out.

The first row of a run's rollouts.jsonl holds the fingerprints of the policy. Every other row is one part of the rollouts.
A row that was cut off is not read, so a part is either complete or absent.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cotrain.config.schema import DatasetRollouts, RunConfig
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

    def __init__(self, folder: Path, fingerprints: dict[str, str]) -> None:
        """Open the file of a run folder. fingerprints: those of the policy, which are written into a new file."""
        rows = read_rows(folder / FILE)
        super().__init__(folder / FILE, resumed_step=len(rows))
        if not rows:
            self.write(0, {"fingerprints": fingerprints})
        self.fingerprints: dict[str, str] = rows[0]["fingerprints"] if rows else fingerprints
        self.rollouts = [StoredRollout(**rollout) for part in rows[1:] for rollout in part["rollouts"]]
        self._rows = max(1, len(rows))

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    def append(self, rollouts: Sequence[StoredRollout]) -> None:
        """Write one more part. Raises OSError when the disk is full; the earlier parts stay intact then."""
        self.write(self._rows, {"rollouts": [asdict(rollout) for rollout in rollouts]})
        self._rows += 1
        self.rollouts += rollouts

    def fingerprint(self) -> str:
        """blake2b over the token ids of all rollouts, in order."""
        token_ids = [[rollout.prompt_token_ids, rollout.token_ids] for rollout in self.rollouts]
        return hashlib.blake2b(json.dumps(token_ids).encode(), digest_size=8).hexdigest()


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


def open_prompts(config: RunConfig, model: Path) -> PromptStream:
    """Open and check the prompts that [init.source] names, and print a note on rows left out. Raises ValueError naming the field."""
    source = config.init.source
    data = source if isinstance(source, DatasetRollouts) else config.task
    task = build_task(data, config.seed, model, config.rollout.max_prompt_tokens)
    if task.left_out:
        print(f"note: left out {task.left_out}")
    return PromptStream(task, load_tokenizer(model), config)
