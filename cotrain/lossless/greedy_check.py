"""Is greedy output the same with and without speculation, on this engine, with these weights?

Speculation verifies several positions in one forward and plain decoding one, so the matrix kernels differ. In float32
that never showed; in bfloat16 two tokens whose logits round to (almost) the same number may swap. Such a tie is told
apart from a real difference by the engine's own log-probs, and counted.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from cotrain.records import Rollout, RolloutBatch, RolloutRequest

TIE_GAP = {"float32": 1e-4, "bfloat16": 0.26}
"""Log-prob gap up to which two tokens count as tied: two units in the last place of a logit of 16 to 32."""


class Generates(Protocol):
    """The engines, as far as this check needs them."""

    def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: object) -> RolloutBatch:
        """One response to each request."""
        ...

    def set_draft_tokens(self, draft_tokens: int | None) -> None:
        """Draft length; 0 is off, None leaves it to the engines."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        ...


@dataclass(frozen=True)
class GreedyCheck:
    """Verdict over some prompts."""

    num_prompts: int
    num_identical: int
    num_tied: int
    """Differ first at a position where both tokens are tied within the number format."""

    @property
    def passed(self) -> bool:
        """No difference but ties."""
        return self.num_identical + self.num_tied == self.num_prompts

    def __str__(self) -> str:
        text = f"{self.num_identical}/{self.num_prompts} prompts identical"
        return text + (f", {self.num_tied} up to a rounding tie" if self.num_tied else "")


def check_greedy(
    engines: Generates, requests: list[RolloutRequest], draft_tokens: int, dtype: str, max_tokens: int
) -> GreedyCheck:
    """Generate greedily with `draft_tokens` and with none; the draft length is the engines' choice afterwards."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": None, "max_tokens": max_tokens}
    arms = []
    try:
        for k in (draft_tokens, 0):
            engines.set_draft_tokens(k)
            engines.reset_prefix_cache()
            arms.append(engines.generate(requests, tap=False, **sampling).rollouts)
    finally:
        engines.set_draft_tokens(None)
        engines.reset_prefix_cache()  # what was cached without speculation has no drafter KV
    speculated, plain = arms
    identical = sum(a.token_ids == b.token_ids for a, b in zip(speculated, plain, strict=True))
    tied = sum(_is_tie(a, b, TIE_GAP[dtype]) for a, b in zip(speculated, plain, strict=True))
    return GreedyCheck(len(requests), identical, tied)


def _is_tie(a: Rollout, b: Rollout, gap: float) -> bool:
    """At the first difference each arm emits its argmax: tied tokens have equal probabilities, so at most 1/2 each."""
    for position, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if x != y:
            p, q = a.log_probs[position], b.log_probs[position]
            return abs(p - q) <= gap and max(p, q) <= math.log(0.5) + gap
    return False
