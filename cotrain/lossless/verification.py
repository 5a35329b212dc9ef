"""What is known of a token beyond its prefix: where in a verification step it was emitted, and from which drafts.

Tokens may be sorted only by what was settled before they were drawn. The number of draft tokens accepted before it
in its step is such a thing; whether the token itself was accepted is not, for accepted tokens have the law
min(p, q) / a and recovered ones max(p - q, 0) / (1 - a), not p. Those two need the drafter's probabilities.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotrain.lossless.draws import Draws

UNDRAFTED, BONUS, UNKNOWN = "undrafted", "bonus", "unknown"


def step_strata(drafted: Sequence[int], accepted: Sequence[int], num_tokens: int, undrafted: int = 1) -> list[str]:
    """Stratum of each of a response's tokens: "undrafted", "drafted 1" to "drafted k", or "bonus".

    drafted, accepted: draft tokens of each verification step, as vLLM's detailed request metrics have them. "drafted
    j" was emitted where draft token j was verified, accepted or not; its law is the target's, given its prefix.
    undrafted: tokens before the first verification step (1: the one that prefill samples). The last step may reach
    past the end of the response, which then stopped within it. A step without draft tokens emits an undrafted one.
    Raises ValueError when steps and tokens do not fit each other.
    """
    if len(drafted) != len(accepted):
        raise ValueError(f"{len(drafted)} steps in drafted, {len(accepted)} in accepted: give both for each step")
    strata = [UNDRAFTED] * undrafted
    for k, a in zip(drafted, accepted, strict=True):
        if not 0 <= a <= k:
            raise ValueError(f"accepted: {a} of {k} draft tokens; must be 0..{k}")
        if len(strata) >= num_tokens:
            raise ValueError(f"steps go on after the {num_tokens} tokens of the response; check `undrafted`")
        strata += [f"drafted {j + 1}" for j in range(a)]
        strata.append(UNDRAFTED if k == 0 else BONUS if a == k else f"drafted {a + 1}")
    if len(strata) < num_tokens:
        raise ValueError(f"steps account for {len(strata)} of {num_tokens} tokens; check `undrafted`")
    return strata[:num_tokens]


def response_strata(steps: Sequence[tuple[int, int]], num_tokens: int) -> list[str]:
    """`step_strata` of a response from vLLM's record of it: (draft tokens, accepted ones) of each step that had drafts.

    vLLM 0.32 (Scheduler.update_from_output) records a step only if it verified draft tokens, before it cuts the last
    one at the end of the response. Prefill emits one token unrecorded, and so does every step without drafts: with
    draft length 0, after a preemption, when the drafter was skipped. When such steps lie between recorded ones nobody
    can tell where; then all tokens are "unknown".
    """
    if not steps:
        return [UNDRAFTED] * num_tokens
    if 1 + sum(accepted + 1 for _, accepted in steps) < num_tokens:
        return [UNKNOWN] * num_tokens
    return step_strata([drafted for drafted, _ in steps], [accepted for _, accepted in steps], num_tokens)


def by_stratum(draws: Draws, strata: Sequence[str] | NDArray[np.str_], at_least: int) -> dict[str, Draws]:
    """The draws of each stratum that has at least so many."""
    labels = np.asarray(strata)
    if len(labels) != len(draws):
        raise ValueError(f"{len(labels)} strata for {len(draws)} draws: give one for each")
    names, counts = np.unique(labels, return_counts=True)
    return {str(n): draws.select(labels == n) for n, c in zip(names, counts, strict=True) if c >= at_least}
