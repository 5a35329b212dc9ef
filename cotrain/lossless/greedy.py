"""Greedy text with speculation against greedy text without, token for token.

Speculation verifies several positions in one forward and plain decoding one, so the matrix kernels differ. In float32
that never showed; in bfloat16 two tokens whose logits round to (almost) the same number may swap. Such a tie is told
apart from a real difference by the engine's own log-probs, and counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cotrain.lossless.family import CheckResult
from cotrain.records import Rollout

TIE_GAP = {"float32": 1e-4, "bfloat16": 0.26}
"""Log-prob gap up to which two tokens count as tied: two units in the last place of a logit of 16 to 32."""


@dataclass(frozen=True)
class GreedyCheck:
    """How many prompts have the same greedy text in both arms."""

    num_prompts: int
    num_identical: int
    num_tied: int
    """Prompts whose texts differ first where both tokens are tied within the number format."""

    @property
    def passed(self) -> bool:
        return self.num_identical + self.num_tied == self.num_prompts

    def result(self, setting: str) -> CheckResult:
        """As a check of a family: a difference is proof. Effect: share of prompts that differ other than by a tie."""
        share = 1 - (self.num_identical + self.num_tied) / self.num_prompts
        return CheckResult("identity", setting, self.num_prompts, share, "share", 1.0 if self.passed else 0.0)

    def __str__(self) -> str:
        text = f"{self.num_identical}/{self.num_prompts} prompts identical"
        return text + (f", {self.num_tied} up to a rounding tie" if self.num_tied else "")


def compare_greedy(plain: Sequence[Rollout], speculated: Sequence[Rollout], dtype: str) -> GreedyCheck:
    """Compare the greedy rollouts of the same prompts, one a prompt in both arms; dtype is the engine's."""
    pairs = list(zip(plain, speculated, strict=True))
    identical = sum(a.token_ids == b.token_ids for a, b in pairs)
    return GreedyCheck(len(pairs), identical, sum(_is_tie(a, b, TIE_GAP[dtype]) for a, b in pairs))


def _is_tie(a: Rollout, b: Rollout, gap: float) -> bool:
    """At the first difference each arm emits its argmax: tied tokens have equal probabilities, so at most 1/2 each."""
    for x, y, p, q in zip(a.token_ids, b.token_ids, a.log_probs, b.log_probs, strict=False):
        if x != y:
            return abs(p - q) <= gap and max(p, q) <= math.log(0.5) + gap
    return False
