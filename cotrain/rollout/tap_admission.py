"""Which requests of a call are tapped. Imports no torch.

The choice is made before they run, with room reserved for the longest response that each may get. It depends on nothing
that comes out: a tap that gave up what outgrew it would hold the short responses.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain.config.schema import FeatureTapConfig, RolloutConfig
from cotrain.records import RolloutRequest


@dataclass(frozen=True, slots=True)
class TapRequest:
    """What the tap must know of a request before it runs."""

    prompt: int
    """Number of the prompt among those of the call. Requests with the same prompt tokens share it, and its rows."""
    prompt_length: int
    max_new_tokens: int


def tap_requests(
    requests: Sequence[RolloutRequest], rollout: RolloutConfig, overrides: Mapping[str, Any]
) -> list[TapRequest]:
    """One of each request of a call. overrides: the call's own sampling parameters."""
    prompts: dict[tuple[int, ...], int] = {}
    return [
        TapRequest(
            prompts.setdefault(tuple(request.prompt_token_ids), len(prompts)),
            len(request.prompt_token_ids),
            overrides.get("max_tokens") or request.max_new_tokens or rollout.max_new_tokens,
        )
        for request in requests
    ]


def choose(requests: Sequence[TapRequest], keys: Sequence[str], bounds: FeatureTapConfig, row_size: int) -> list[int]:
    """Which requests are tapped, ascending: as many as fit, in the order of a hash of their keys.

    keys: names of the requests that change from call to call, so that no sample is left out for ever. row_size: bytes
    of one row. Raises ValueError when the first one does not fit.
    """
    order = sorted(range(len(requests)), key=lambda i: hashlib.blake2b(keys[i].encode(), digest_size=8).digest())
    chosen: list[int] = []
    prompts: set[int] = set()
    num_bytes = 0
    for i in order:
        request = requests[i]
        rows = request.max_new_tokens + (0 if request.prompt in prompts else request.prompt_length)
        num_bytes += rows * row_size
        if num_bytes > bounds.max_bytes:
            break  # a shorter one further on might fit; to take it would favour short prompts
        chosen.append(i)
        prompts.add(request.prompt)
    if requests and not chosen:
        raise ValueError(_too_small(num_bytes, bounds))
    return sorted(chosen)


def first_of_each_prompt(tapped: Mapping[str, TapRequest]) -> set[str]:
    """Name of one tapped request for each prompt. What this one computes of the prompt serves all others."""
    first: dict[int, str] = {}
    for name, request in tapped.items():
        first.setdefault(request.prompt, name)
    return set(first.values())


def fewest_tapped(rollout: RolloutConfig, row_size: int) -> int:
    """Rollouts of a step that all engines tap together, if every prompt has the greatest length.

    Raises ValueError when not even one fits.
    """
    tapped = 0
    for engine in range(min(rollout.num_engines, rollout.prompts_per_step)):
        prompts = range(engine, rollout.prompts_per_step, rollout.num_engines)
        requests = [
            TapRequest(prompt, rollout.max_prompt_tokens, rollout.max_new_tokens)
            for prompt in prompts
            for _ in range(rollout.samples_per_prompt)
        ]
        keys = [str(i) for i in range(len(requests))]
        tapped += len(choose(requests, keys, rollout.features, row_size))
    return tapped


def within_bounds(
    sequences: Sequence[tuple[list[int], int]], bounds: FeatureTapConfig, row_size: int
) -> Iterator[list[tuple[list[int], int]]]:
    """Sequences, (tokens, prompt length) each, in groups that a tap holds whole. Raises ValueError where one is more."""
    group: list[tuple[list[int], int]] = []
    num_bytes = 0
    for sequence in sequences:
        size = len(sequence[0]) * row_size
        if size > bounds.max_bytes:
            raise ValueError(_too_small(size, bounds))
        if group and num_bytes + size > bounds.max_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(sequence)
        num_bytes += size
    if group:
        yield group


def row_bytes(width: int, bytes_per_value: int) -> int:
    """Bytes of one row: hidden states and token id."""
    return width * bytes_per_value + 8


def _too_small(num_bytes: int, bounds: FeatureTapConfig) -> str:
    return f"rollout.features.max_bytes: one sequence takes {num_bytes} bytes, above {bounds.max_bytes}; raise it"
