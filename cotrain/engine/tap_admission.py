"""Chooses which requests of an engine are tapped, before they run. Imports no torch.

Drafters must meet long responses as often as the policy writes them, so nothing here looks at the response that it decides on.
A random number that each request draws before it runs decides:

- A share of them is tapped, as many as drafters train on and are judged by.
- If not all of these fit, the lowest numbers are. Room is reserved by the mean length of earlier responses, tapped or not, and
  SPREADS standard deviations of the sum, as if all responses to one prompt had the same length. So it rarely happens that they
  outgrow the room. Until enough have ended, room is reserved for the longest response that each may get.
- If they outgrow it all the same, the tap drops whole responses, those of the newest call first and in it the highest number,
  until the others fit. To drop the one that needs the room would favour short ones, and so would dropping the oldest. Drops are
  counted as rollout/dropped_features. One response is held however long it gets.

One preference is left, for short ones in proportion to the share that is dropped: what has ended cannot be dropped any more.
"""

import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

OTHER_LAWS = (
    "presence_penalty", "frequency_penalty", "min_p", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
    "structured_outputs", "thinking_token_budget", "watermarking",
)  # fmt: skip
"""Sampling parameters of vLLM that, when set, change the distribution of the tokens from the one that drafters train for."""

ANY_ADAPTER = "*"

MOST_REASONS, OTHERS = 64, "other reasons"
"""Reasons that are counted apart: each names an adapter, and a host may have ever new ones."""

SPREADS = 3.0  # standard deviations above its mean for which the sum of the lengths of tapped responses has room

FEWEST_LENGTHS, MOST_LENGTHS = 64, 1024
"""Responses that must have ended before room is reserved by their lengths, and newest ones that it is reserved by."""


class TapRequest(NamedTuple):
    """What the tap must know about a request before it runs."""

    prompt: str  # id of the prompt. Requests with the same prompt share its rows.
    prompt_length: int
    max_new_tokens: int
    rank: float = 0.0
    """Number of the call that chose it, and a random number in [0, 1). The highest rank is dropped first."""


class Admission:
    """Chooses which requests of one engine are tapped: a random share of those that drafters can learn from, as many as fit."""

    def __init__(self, max_bytes: int, row_size: int, seed: str):
        """row_size: bytes of one row. seed: of a generator of its own, which leaves a host's random numbers alone."""
        self._max_rows, self._random, self._calls = max_bytes // row_size, random.Random(seed), 0
        self.tapped: dict[str, TapRequest] = {}  # tapped requests that have not ended, by name
        self.dropped: Counter[str] = Counter()
        """Number of a host's requests that were not tapped, by reason. Requests that the share leaves out are not counted."""
        self._lengths = deque[int](maxlen=MOST_LENGTHS)
        self._entered: dict[str, int | None] = {}  # lengths to learn from, None while a response runs

    def observe(self, lengths: Mapping[str, int]) -> None:
        """Learn that responses have ended, tapped or not. Each counts once all before it have ended: short ones end first."""
        self.tapped = {name: request for name, request in self.tapped.items() if name not in lengths}
        self._entered |= {name: length for name, length in lengths.items() if name in self._entered}
        while self._entered and (length := self._entered[first := next(iter(self._entered))]) is not None:
            self._lengths.append(length)
            del self._entered[first]

    def forget(self, names: Collection[str]) -> None:
        """Free the room of requests that have failed. Nothing is learnt of their lengths."""
        for name in names:
            self.tapped.pop(name, None)
            self._entered.pop(name, None)

    def choose(self, requests: Mapping[str, TapRequest], share: float = 1.0) -> dict[str, TapRequest]:
        """Return which of these requests are tapped from now on, in the order given. If none runs yet, one is, however long."""
        self._calls += 1
        drawn = {name: request._replace(rank=self._calls + self._random.random()) for name, request in requests.items()}
        ranked = sorted((r for r in drawn.values() if r.rank < self._calls + share), key=lambda request: request.rank)
        held = [*self.tapped.values()]
        # A request later in the order might fit where one does not, but taking it would favour short prompts.
        fit = bisect_right(range(1, len(ranked) + 1), self._max_rows, key=lambda n: self.reserved([*held, *ranked[:n]]))
        taken = set(ranked[: fit if held else max(1, fit)])
        chosen = {name: request for name, request in drawn.items() if request in taken}
        self.tapped |= chosen
        self._entered |= dict.fromkeys(requests)
        self.dropped["no room in the tap"] += len(ranked) - len(chosen)
        return chosen

    def reserved(self, requests: Collection[TapRequest]) -> int:
        """Return the rows that these requests hardly ever exceed together. Those with the same prompt share its rows."""
        prompts = {request.prompt: request.prompt_length for request in requests}
        rows = sum(request.max_new_tokens for request in requests)
        if len(self._lengths) >= FEWEST_LENGTHS:
            lengths, alike = np.array(self._lengths), Counter(request.prompt for request in requests)
            spread = lengths.std() * sum(number**2 for number in alike.values()) ** 0.5
            rows = min(rows, int(len(requests) * lengths.mean() + SPREADS * spread))
        return sum(prompts.values()) + rows

    def admit(self, requests: Iterable[Any], share: float, adapter: str = "") -> dict[str, TapRequest]:
        """Choose among new requests of a host (vLLM's NewRequestData). Returns those to tap, by name. adapter: see SidecarConfig."""
        asked = dict[str, TapRequest]()
        for new in requests:
            if new.req_id in self.tapped or len(new.prefill_token_ids or ()) > len(new.prompt_token_ids or ()):
                continue  # it resumes after a preemption, and the scheduler for model runner V2 lists it as new again
            if (reason := left_out(new, adapter)) is not None:
                self.dropped[reason if reason in self.dropped or len(self.dropped) < MOST_REASONS else OTHERS] += 1
            else:
                prompt = str(hash((adapter_of(new), *new.prompt_token_ids)))
                asked[new.req_id] = TapRequest(prompt, len(new.prompt_token_ids), new.sampling_params.max_tokens)
        return self.choose(asked, share)


def adapter_of(request: Any) -> str:
    """Return the name of a request's LoRA adapter; empty without one."""
    return "" if request.lora_request is None else str(request.lora_request.lora_name)


def left_out(request: Any, adapter: str = "") -> str | None:
    """Return why a request of a host is not tapped, or None when it may be. adapter: whose requests are tapped, see SidecarConfig."""
    law = request.sampling_params
    if law is None or request.prompt_token_ids is None or request.mm_features:
        return "not text to text"
    if adapter not in (ANY_ADAPTER, own := adapter_of(request)):
        return f"adapter {own}" if own else "without an adapter"
    taken = (law.extra_args or {}).get("cotrain", True)
    if str(taken).lower() in ("false", "0"):  # vLLM's server reads JSON's false as 0
        return "opted out"
    changed = ["repetition_penalty"] if law.repetition_penalty != 1.0 else []
    changed += [name for name in OTHER_LAWS if getattr(law, name, None)]
    return f"{changed[0]} is set" if changed else None


def first_of_each_prompt(tapped: Mapping[str, TapRequest]) -> set[str]:
    """Return the name of each prompt's first tapped request. The prompt rows that it computes serve all the others."""
    return set({request.prompt: name for name, request in reversed(list(tapped.items()))}.values())


def row_bytes(width: int, bytes_per_value: int) -> int:
    """Bytes of one row: hidden states, token id and policy version."""
    return width * bytes_per_value + 16
