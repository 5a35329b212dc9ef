"""Where the rollouts of `cotrain init` come from: prompts for the policy to answer, or rollouts of an earlier one."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cotrain.config.schema import DatasetRollouts, PolicyRollouts, RunConfig
from cotrain.records import RolloutRequest
from cotrain.roles.engines import derived_seed
from cotrain.rollout.engine import RolloutEngine
from cotrain.run.console import duration
from cotrain.tasks.base import build_task
from cotrain.tasks.datasets import find_prompt_column, load_rows, split_question
from cotrain.tasks.prompts import PromptEncoder, PromptOrder, apply_template, chat_messages
from pipelines.initialise.rollouts import Corpus, StoredRollout, read_recorded

PART_ROLLOUTS = 128
"""Most rollouts of one part on disk, which is what a crash can lose."""


@dataclass(frozen=True)
class PromptStream:
    """An endless series of prompts in seeded order; used-up prompts come again in another order with new samples."""

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
        """All samples of the prompts number first to first + count - 1 of the series."""
        seed, samples = self.config.seed, self.config.rollout.samples_per_prompt
        order, requests = PromptOrder(self.num_prompts, 1, seed), []
        for number in range(first, first + count):
            prompt_id, token_ids = self.encode(order.step(number + 1)[0])
            first_sample = number // self.num_prompts * samples
            for sample in range(first_sample, first_sample + samples):
                requests.append(RolloutRequest(prompt_id, sample, token_ids, derived_seed(seed, 0, prompt_id, sample)))
        return requests


@dataclass(frozen=True)
class GivenRollouts:
    """Rollouts that an earlier `cotrain init` has collected."""

    rollouts: list[StoredRollout]

    async def next_part(self, engine: RolloutEngine, done: int, count: int) -> list[StoredRollout]:
        """As PromptStream's; empty when there are no more."""
        return self.rollouts[done : done + count]


Source = PromptStream | GivenRollouts


def open_source(config: RunConfig, model: Path, fingerprints: dict[str, str]) -> Source:
    """The source of [init.source], read and checked, with notes on the console. Raises ValueError naming its field."""
    source = config.init.source
    if isinstance(source, PolicyRollouts):
        task = build_task(config.task, config.seed)
        encoder = PromptEncoder(AutoTokenizer.from_pretrained(model), config.rollout.max_prompt_tokens)

        def encode(index: int) -> tuple[str, list[int]]:
            prompt = task.prompt(index)
            return prompt.id, encoder.encode(prompt)

        return PromptStream(len(task), encode, config)
    try:
        if isinstance(source, DatasetRollouts):
            return _from_dataset(source, config, AutoTokenizer.from_pretrained(model))
        rollouts, about = read_recorded(source.path, fingerprints)
        if about["sampling"] != sampling(config):
            print(f"note: the rollouts were sampled with {about['sampling']}, [rollout] has {sampling(config)}")
        return GivenRollouts(_fitting(rollouts, config, source.path))
    except ValueError as error:
        raise ValueError(str(error).replace("task.", "init.source.")) from error


def sampling(config: RunConfig) -> dict[str, float]:
    """How responses are drawn, as the corpus records it."""
    return config.rollout.model_dump(include={"temperature", "top_p", "top_k"})


async def collect(
    engine: RolloutEngine,
    corpus: Corpus,
    source: Source,
    config: RunConfig,
    say: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> bool:
    """Append parts until there are init.tokens response tokens. Returns False when asked to stop early.

    The next part depends on the corpus alone, so that an interrupted collection ends as any other.
    """
    wanted, before, started = config.init.tokens, corpus.num_response_tokens, time.monotonic()
    while not stop_requested():
        have, done = corpus.num_response_tokens, len(corpus.rollouts)
        if have >= wanted:
            return True
        mean_length = have / done if done else config.rollout.max_new_tokens
        part = await source.next_part(engine, done, min(PART_ROLLOUTS, ceil((wanted - have) / mean_length)))
        if not part:
            say(f"note: init.source has no more than {have:,} response tokens; init.tokens asks for {wanted:,}")
            return True
        corpus.append(part)
        have = corpus.num_response_tokens
        rate = (have - before) / (time.monotonic() - started)
        eta = duration(max(0, wanted - have) / rate, decimals=0)
        say(f"rollouts {len(corpus.rollouts):,}  {have:,}/{wanted:,} tokens  {rate:,.0f} tok/s  eta {eta}")
    return False


def _from_dataset(source: DatasetRollouts, config: RunConfig, tokenizer: Any) -> PromptStream:
    rows = load_rows(source)
    column = find_prompt_column(source, rows.column_names)
    found = []
    for index, row in enumerate(rows):
        question, _ = split_question(row[column], column, f"row {index} of {source.path}")
        token_ids = apply_template(tokenizer, chat_messages(question, "", ""))
        found.append(StoredRollout(f"{Path(source.path).stem}-{index}", 0, token_ids, []))
    prompts = [(kept.prompt_id, kept.prompt_token_ids) for kept in _fitting(found, config, source.path)]
    return PromptStream(len(prompts), prompts.__getitem__, config)


def _fitting(rollouts: list[StoredRollout], config: RunConfig, path: str) -> list[StoredRollout]:
    """The rollouts within the bounds of [rollout]; a note says how many others there are."""
    limit, longest = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    kept = [r for r in rollouts if len(r.prompt_token_ids) <= limit and len(r.token_ids) <= longest]
    if not kept:
        raise ValueError(f"task.path: {path} has nothing within rollout.max_prompt_tokens and max_new_tokens")
    if left_out := len(rollouts) - len(kept):
        bounds = "rollout.max_prompt_tokens or max_new_tokens"
        print(f"note: {left_out} of {len(rollouts)} are over {bounds} and left out")
    return kept
