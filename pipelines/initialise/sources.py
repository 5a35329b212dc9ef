"""The rollouts of `cotrain init`: where they come from, how they are kept, and their split into training and hold-out.

The first row of a run's rollouts.jsonl describes the policy and its sampling. Every other row is one part of the rollouts.
A row that was cut off is not read, so a part is either complete or absent.
"""

import hashlib
import json
import random
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
        """Write one more part. Raises OSError when the disk is full; the earlier parts stay intact then."""
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


PART_ROLLOUTS = 128
"""Maximum number of rollouts of one part on disk, and so the most that a crash can lose."""


@dataclass(frozen=True)
class PromptStream:
    """An endless series of prompts in seeded order. Once all are used, they come again in another order, with new samples."""

    num_prompts: int
    encode: Callable[[int], tuple[str, list[int]]]
    """Index -> (prompt id, token ids)."""
    config: RunConfig

    async def next_part(self, engine: RolloutEngine, done: int, count: int) -> list[StoredRollout]:
        """Generate about `count` rollouts after the first `done` ones."""
        samples = self.config.rollout.samples_per_prompt
        batch = await engine.generate(self.requests(done // samples, max(1, round(count / samples))), tap=False)
        return [StoredRollout(r.prompt_id, r.sample_index, r.prompt_token_ids, r.token_ids) for r in batch.rollouts]

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
        rollouts, about = read_recorded(source.path, fingerprints)
        if about["sampling"] != sampling(config):
            print(f"note: the rollouts were sampled with {about['sampling']}, [rollout] has {sampling(config)}")
        return _fitting(rollouts, config, source.path)
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
    while not stop_requested():
        have, done = corpus.num_response_tokens, len(corpus.rollouts)
        if have >= wanted:
            return True
        mean_length = have / done if done else config.rollout.max_new_tokens
        count = min(PART_ROLLOUTS, ceil((wanted - have) / mean_length))
        if isinstance(source, list):
            part = source[done : done + count]
        else:
            part = await source.next_part(engine, done, count)
        if not part:
            say(f"note: init.source has no more than {have:,} response tokens; init.tokens asks for {wanted:,}")
            return True
        corpus.append(part)
        have = corpus.num_response_tokens
        rate = (have - before) / (time.monotonic() - started)
        eta = duration(max(0, wanted - have) / rate, decimals=0)
        say(f"rollouts {len(corpus.rollouts):,}  {have:,}/{wanted:,} tokens  {rate:,.0f} tok/s  eta {eta}")
    return False


def _fitting(rollouts: list[StoredRollout], config: RunConfig, path: str) -> list[StoredRollout]:
    """The rollouts within the length limits of [rollout]; prints how many are left out. Raises ValueError if all are."""
    limit, longest = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    kept = [r for r in rollouts if len(r.prompt_token_ids) <= limit and len(r.token_ids) <= longest]
    if not kept:
        raise ValueError(f"init.source.path: {path} has nothing within rollout.max_prompt_tokens and max_new_tokens")
    if left_out := len(rollouts) - len(kept):
        bounds = "rollout.max_prompt_tokens or max_new_tokens"
        print(f"note: {left_out} of {len(rollouts)} are over {bounds} and left out")
    return kept
