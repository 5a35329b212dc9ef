"""The text of `cotrain init`: where it comes from, how it is stored, and what of it is held out.

The first row of a run's rollouts.jsonl describes the policy and its sampling. Every other row is one part of the rollouts.
A row that was cut off is not read, so a part is either complete or absent.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from cotrain.config.schema import DatasetRollouts, RecordedRollouts, RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.records import RolloutRequest, derived_seed
from cotrain.run.console import duration
from cotrain.run.rows import RowFile, read_rows
from cotrain.tasks.base import build_task
from cotrain.tasks.prompts import PromptOrder, encode_prompt, load_tokenizer

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


def _rollouts(parts: Sequence[dict[str, Any]]) -> list[StoredRollout]:
    return [StoredRollout(**rollout) for part in parts for rollout in part["rollouts"]]


def read_recorded(path: str, config: RunConfig, fingerprints: dict[str, str]) -> list[StoredRollout]:
    """The rollouts in the run folder of an earlier `cotrain init` of the same policy. Prints a note if their sampling differs.

    Raises ValueError naming init.source.path when there are none, or they are of another policy or tokenizer, or too long.
    """
    about, *parts = read_rows(Path(path).expanduser() / FILE) or [{}]
    if not parts:
        raise ValueError(
            f"init.source.path: {path} is no run folder of a `cotrain init` with a complete part of {FILE}; finish that "
            'run with --resume, or collect rollouts with init.source.type = "policy"'
        )
    if about["fingerprints"] != fingerprints:
        raise ValueError(
            f"init.source.path: {path}: rollouts of another policy or tokenizer (they were made with {about['policy']}); "
            "set policy.model to that one, or collect new rollouts"
        )
    if about["sampling"] != sampling(config):
        print(f"note: the rollouts were sampled with {about['sampling']}, [rollout] has {sampling(config)}")
    rollouts = _rollouts(parts)
    prompt, response = (max(len(getattr(r, ids)) for r in rollouts) for ids in ("prompt_token_ids", "token_ids"))
    if prompt > config.rollout.max_prompt_tokens or response > config.rollout.max_new_tokens:
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


def data_fingerprint(rollouts: Iterable[StoredRollout]) -> str:
    """blake2b over the token ids of all rollouts, in order."""
    token_ids = [[rollout.prompt_token_ids, rollout.token_ids] for rollout in rollouts]
    return hashlib.blake2b(json.dumps(token_ids).encode(), digest_size=8).hexdigest()


PART_ROLLOUTS, HELD_OUT = 128, 128
"""Most rollouts of one part on disk, and so the most that a crash can lose; most rollouts that are held out."""


@dataclass(frozen=True)
class PromptStream:
    """An endless series of prompts in seeded order. Once all are used, they come again in another order, with new samples."""

    num_prompts: int
    encode: Callable[[int], tuple[str, list[int]]]
    """Index -> (prompt id, token ids)."""
    config: RunConfig

    def requests(self, first: int, count: int) -> list[RolloutRequest]:
        """The requests for all samples of prompts `first` to `first + count - 1` of the series."""
        seed, samples = self.config.seed, self.config.rollout.samples_per_prompt
        order, requests = PromptOrder(self.num_prompts, 1, seed), []
        for number in range(first, first + count):
            prompt_id, token_ids = self.encode(order.step(number + 1)[0])
            first_sample = number // self.num_prompts * samples
            for sample in range(first_sample, first_sample + samples):
                requests.append(RolloutRequest(prompt_id, sample, token_ids, derived_seed(seed, 0, prompt_id, sample)))
        return requests


Source = PromptStream | list[StoredRollout]
"""Prompts that the policy answers, or rollouts that an earlier `cotrain init` has collected."""


def open_source(config: RunConfig, model: Path, fingerprints: dict[str, str]) -> Source:
    """Open and check the source that [init.source] names, and print notes on it. Raises ValueError naming its field."""
    source, limit = config.init.source, config.rollout.max_prompt_tokens
    if isinstance(source, RecordedRollouts):
        return read_recorded(source.path, config, fingerprints)
    task = build_task(source if isinstance(source, DatasetRollouts) else config.task, config.seed, model, limit)
    if task.left_out:
        print(f"note: left out {task.left_out}")
    tokenizer = load_tokenizer(model)

    def encode(index: int) -> tuple[str, list[int]]:
        prompt = task.prompt(index)
        return prompt.id, encode_prompt(tokenizer, prompt, limit)

    return PromptStream(len(task), encode, config)


def sampling(config: RunConfig) -> dict[str, float]:
    """The sampling parameters of responses, as the corpus records them."""
    return config.rollout.model_dump(include={"temperature", "top_p", "top_k"})


async def collect(
    engine: RolloutEngine,
    corpus: Corpus,
    source: Source,
    config: RunConfig,
    say: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> bool:
    """Append parts until there are init.tokens response tokens or the source ends. Returns False when asked to stop early.

    What the next part holds depends on the corpus alone, so an interrupted collection continues as if it had not been.
    """
    wanted, before, started = config.init.tokens, corpus.num_response_tokens, time.monotonic()
    samples = config.rollout.samples_per_prompt
    while not stop_requested():
        have, done = corpus.num_response_tokens, len(corpus.rollouts)
        if have >= wanted:
            return True
        mean_length = have / done if done else config.rollout.max_new_tokens
        count = min(PART_ROLLOUTS, ceil((wanted - have) / mean_length))
        if isinstance(source, list):
            part = source[done : done + count]
        else:
            requests = source.requests(done // samples, max(1, round(count / samples)))
            batch = await engine.generate(requests, tap=False)
            part = [StoredRollout(r.prompt_id, r.sample_index, r.prompt_token_ids, r.token_ids) for r in batch.rollouts]
        if not part:
            say(f"note: init.source has no more than {have:,} response tokens; init.tokens asks for {wanted:,}")
            return True
        corpus.append(part)
        have = corpus.num_response_tokens
        rate = (have - before) / (time.monotonic() - started)
        eta = duration(max(0, wanted - have) / rate, decimals=0)
        say(f"rollouts {len(corpus.rollouts):,}  {have:,}/{wanted:,} tokens  {rate:,.0f} tok/s  eta {eta}")
    return False
