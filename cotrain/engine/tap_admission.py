"""Chooses which requests of a call are tapped. Imports no torch.

The choice is made before the requests run, and it reserves room for the longest response that each may get. It must not depend
on the responses: a tap that dropped the responses which outgrew it would keep the short ones.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cotrain.config.schema import RolloutConfig

OTHER_LAWS = (
    "presence_penalty", "frequency_penalty", "min_p", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
    "structured_outputs", "thinking_token_budget", "watermarking",
)  # fmt: skip
"""Sampling parameters of vLLM that, when set, change the distribution of the tokens from the one that drafters train for."""


class TapRequest(NamedTuple):
    """What the tap must know about a request before it runs."""

    prompt: str
    """Id of the prompt. Requests with the same prompt share its rows."""
    prompt_length: int
    max_new_tokens: int


def choose(
    requests: Mapping[str, TapRequest], key: str, max_bytes: int, row_size: int, taken: int = 0
) -> dict[str, TapRequest]:
    """Return the requests to tap, in the order given: as many as fit, taken in a random order that the key decides.

    The key must change from call to call, so that no sample is left out forever. row_size: bytes of one row. taken: bytes
    already reserved for running requests. Raises ValueError when the first request taken is larger than max_bytes by itself.
    """
    chosen: set[str] = set()
    prompts: set[str] = set()
    num_bytes = 0
    for name in random.Random(key).sample(list(requests), len(requests)):
        request = requests[name]
        num_rows = request.max_new_tokens + (0 if request.prompt in prompts else request.prompt_length)
        num_bytes += num_rows * row_size
        if taken + num_bytes > max_bytes:
            break  # a shorter request later in the order might fit, but taking it would favour short prompts
        chosen.add(name)
        prompts.add(request.prompt)
    if not chosen and num_bytes > max_bytes:
        bound = f"one sequence takes {num_bytes} bytes of the tap, above {max_bytes}"
        raise ValueError(f"rollout.features.max_bytes: {bound}; raise it")
    return {name: request for name, request in requests.items() if name in chosen}


class Admission:
    """Chooses which requests of a host are tapped: a random share of those that drafters can learn from, as many as fit."""

    def __init__(self, share: float, max_bytes: int, row_size: int, seed: str):
        """row_size: bytes of one row. seed: of a generator of its own, which leaves the host's random numbers alone."""
        self.share, self._max_bytes, self._row_size, self._random = share, max_bytes, row_size, random.Random(seed)
        self.tapped: dict[str, TapRequest] = {}
        """Tapped requests that are running, by name. The caller removes a request when it has ended."""
        self.dropped: Counter[str] = Counter()
        """Number of requests that were not tapped, by reason. Requests that the share leaves out are not counted."""

    def admit(self, requests: Iterable[Any]) -> dict[str, TapRequest]:
        """Choose among new requests (vLLM's NewRequestData). Returns those to tap, by name."""
        asked, chosen = dict[str, TapRequest](), dict[str, TapRequest]()
        for new in requests:
            if new.req_id in self.tapped or len(new.prefill_token_ids or ()) > len(new.prompt_token_ids or ()):
                continue  # it resumes after a preemption, and the scheduler for model runner V2 lists it as new again
            if (reason := left_out(new)) is not None:
                self.dropped[reason] += 1
            elif self._random.random() < self.share:
                prompt = str(hash(tuple(new.prompt_token_ids)))
                asked[new.req_id] = TapRequest(prompt, len(new.prompt_token_ids), new.sampling_params.max_tokens)
        with suppress(ValueError):  # raised when one of them alone is above the bound
            key, taken = str(self._random.random()), reserved_bytes(self.tapped, self._row_size)
            chosen = choose(asked, key, self._max_bytes, self._row_size, taken)
        self.dropped["no room in the tap"] += len(asked) - len(chosen)
        self.tapped |= chosen
        return chosen


def left_out(request: Any) -> str | None:
    """Return why a request of a host is not tapped, or None when it may be."""
    law = request.sampling_params
    if law is None or request.prompt_token_ids is None or request.mm_features or request.lora_request is not None:
        return "not text to text"
    taken = (law.extra_args or {}).get("cotrain", True)
    if str(taken).lower() in ("false", "0"):  # vLLM's server reads JSON's false as 0
        return "opted out"
    changed = ["repetition_penalty"] if law.repetition_penalty != 1.0 else []
    changed += [name for name in OTHER_LAWS if getattr(law, name, None)]
    return f"{changed[0]} is set" if changed else None


def reserved_bytes(tapped: Mapping[str, TapRequest], row_size: int) -> int:
    """Return the most bytes that these requests take. Requests with the same prompt share its rows."""
    prompts = {request.prompt: request.prompt_length for request in tapped.values()}
    return (sum(prompts.values()) + sum(request.max_new_tokens for request in tapped.values())) * row_size


def first_of_each_prompt(tapped: Mapping[str, TapRequest]) -> set[str]:
    """Return the name of each prompt's first tapped request. The prompt rows that it computes serve all the others."""
    return set({request.prompt: name for name, request in reversed(list(tapped.items()))}.values())


def fewest_tapped(rollout: "RolloutConfig", row_size: int) -> int:
    """Return how many rollouts of a step all engines together tap if every prompt has the greatest length.

    Raises ValueError when not even one fits.
    """
    tapped = 0
    for engine in range(min(rollout.num_engines, rollout.prompts_per_step)):
        requests = {
            f"{prompt}/{sample}": TapRequest(str(prompt), rollout.max_prompt_tokens, rollout.max_new_tokens)
            for prompt in range(engine, rollout.prompts_per_step, rollout.num_engines)
            for sample in range(rollout.samples_per_prompt)
        }
        tapped += len(choose(requests, "", rollout.features.max_bytes, row_size))
    return tapped


def row_bytes(width: int, bytes_per_value: int) -> int:
    """Bytes of one row: hidden states, token id and policy version."""
    return width * bytes_per_value + 16
