"""Fills a corpus from its source until it has the tokens asked for; goes on where an earlier attempt stopped."""

import time
from collections.abc import Callable
from math import ceil
from typing import Any, Protocol

from cotrain.records import RolloutBatch, RolloutRequest
from cotrain.run.console import duration
from pipelines.initialise.corpus import Corpus, StoredRollout
from pipelines.initialise.sources import GivenRollouts, Source

PART_ROLLOUTS = 128
"""Most rollouts of one part on disk: what a crash can lose."""


class Generator(Protocol):
    """The engine, as far as responses are concerned."""

    async def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """One response to each request, in the order given."""
        ...


async def collect(
    engine: Generator,
    corpus: Corpus,
    source: Source,
    num_tokens: int,
    max_new_tokens: int,
    say: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> bool:
    """Append parts until there are num_tokens response tokens. Returns False when asked to stop early.

    What is asked for next depends on the corpus alone, so that an interrupted collection ends as any other.
    """
    before, started = corpus.num_response_tokens, time.monotonic()
    while (have := corpus.num_response_tokens) < num_tokens:
        if stop_requested():
            return False
        part = await _next_part(engine, corpus, source, num_tokens - have, max_new_tokens)
        if not part:
            say(f"note: init.source has no more than {have:,} response tokens; init.tokens asks for {num_tokens:,}")
            return True
        corpus.append(part)
        have = corpus.num_response_tokens
        if isinstance(source, GivenRollouts):
            continue  # nothing is generated
        rate = (have - before) / (time.monotonic() - started)
        eta = duration(max(0, num_tokens - have) / rate, decimals=0)
        say(f"rollouts {len(corpus.rollouts):,}  {have:,}/{num_tokens:,} tokens  {rate:,.0f} tok/s  eta {eta}")
    if isinstance(source, GivenRollouts):
        say(f"rollouts {len(corpus.rollouts):,}  {corpus.num_response_tokens:,} tokens, given")
    return not stop_requested()


async def _next_part(
    engine: Generator, corpus: Corpus, source: Source, tokens_left: int, max_new_tokens: int
) -> list[StoredRollout]:
    """As many rollouts as the tokens left ask for, by the mean length so far."""
    done = len(corpus.rollouts)
    mean_length = corpus.num_response_tokens / done if done else max_new_tokens
    rollouts = min(PART_ROLLOUTS, ceil(tokens_left / mean_length))
    if isinstance(source, GivenRollouts):
        return source.rollouts[done : done + rollouts]
    samples = source.samples_per_prompt
    requests = source.requests(done // samples, max(1, round(rollouts / samples)))
    batch = await engine.generate(requests, tap=False)
    return [
        StoredRollout(r.prompt_id, r.sample_index, r.prompt_token_ids, r.token_ids, r.finish_reason)
        for r in batch.rollouts
    ]
