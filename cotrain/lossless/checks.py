"""Tests of emitted tokens against their exact distributions, over a whole setting and at each place in a verification step.

A token's target distribution depends on the text before it, so there are no cells to count. The randomised probability
integral transform turns each token into a number that is uniform, conditional on all tokens before it, for any distributions
(Smith 1985, Czado et al. 2009): these numbers are independent and uniform for a fixed number of tokens (generate with
ignore_eos; texts that end at a stop token add a deviation of the order of the number of texts over that of tokens).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cotrain.lossless.emitted import ORDERS, Draws, Floats, concatenate
from cotrain.lossless.family import CheckResult
from cotrain.records import Rollout
from drafters.base import SamplingParams

LOGIT_ERROR = {"float32": 5e-4, "bfloat16": 0.25}
"""Largest difference of a logit between the engine in this number format and a float32 forward pass of the same weights.
float32: kernels add up in another order. bfloat16: two units in the last place of a logit of 16 to 32."""

EDGE_SHARE = 0.01  # largest share of tokens at which the engine truncates elsewhere: at ties within a logit's error
RARE_EDGES = 0.01  # logit error above which top-k and top-p often truncate at another token in the engine
LEAST_TOKENS = 100  # fewest tokens of a stratum that get checks of their own
UNDRAFTED, BONUS, UNKNOWN = "undrafted", "bonus", "unknown"


def setting_checks(
    rollouts: Sequence[Rollout],
    samplings: Sequence[SamplingParams],
    draws: Sequence[Draws],
    name: str,
    rng: np.random.Generator,
    logit_error: float,
) -> list[CheckResult]:
    """Make all checks of one setting; each rollout has one entry in samplings and in draws. logit_error: see LOGIT_ERROR.

    Greedy requests of a mixed batch count only for `support`: their only possible token has probability 1.
    """
    together = concatenate(draws)
    results = [support_check(together, name)]
    lengths = [len(part) for part in draws]
    sampled = np.repeat([sampling.temperature > 0 for sampling in samplings], lengths)
    if not sampled.any():
        return results
    random = together.select(sampled)
    returned: Floats = np.concatenate([rollout.log_probs for rollout in rollouts])[sampled]
    tolerances = [log_prob_tolerance(s, logit_error) if s.temperature else (0.0, 0.0) for s in samplings]
    tolerance, edge = np.repeat(tolerances, lengths, axis=0)[sampled].T
    results.append(returned_log_prob_check(returned, random, name, tolerance, edge))
    strata = np.concatenate([response_strata(r.verification_steps, len(r.token_ids)) for r in rollouts])[sampled]
    parts = {name: random}
    if len(set(strata)) > 1:
        parts |= {f"{name}: {stratum}": part for stratum, part in by_stratum(random, strata).items()}
    orders = range(random.before.shape[1])
    return results + [uniformity_check(d, part, rng, order) for part, d in parts.items() for order in orders]


def support_check(draws: Draws, setting: str) -> CheckResult:
    """Check that no token has probability 0. One such token is enough: p is 0 with any, 1 without. Effect: their share."""
    share = float(draws.outside.mean())
    return CheckResult("support", setting, len(draws), share, "share", 0.0 if share else 1.0)


def uniformity_check(draws: Draws, setting: str, rng: np.random.Generator, order: int = 0) -> CheckResult:
    """Kolmogorov-Smirnov test of the transformed tokens, exact in finite samples, in one of ORDERS; rng randomises the transform.

    Effect: largest difference between the observed and the predicted share of tokens up to a point of the order. It
    estimates a lower bound of the mean total variation distance, and that distance itself when the tokens drawn too
    often all come before those drawn too rarely (sharpening or flattening, with the order by probability).
    """
    transformed = draws.before[:, order] + rng.random(len(draws)) * draws.probability
    test = stats.kstest(transformed, "uniform", method="exact")
    return CheckResult(
        f"uniformity by {ORDERS[order]}", setting, len(draws), float(test.statistic), "TV", float(test.pvalue)
    )


def returned_log_prob_check(
    returned: Floats, draws: Draws, setting: str, tolerance: float | Floats, edge: float | Floats = 0.0
) -> CheckResult:
    """Check that the engine's returned log-probs [N] are those of the exact distribution, up to the tolerance in nats.

    edge: how much more a log-prob may differ where the engine truncates at another token. Both are one number, or one per
    token [N]. A difference beyond their sum is enough: p is 0. Otherwise p is the probability that at least this
    many tokens lie beyond the tolerance if each does with probability EDGE_SHARE, whatever the others do. A false alarm
    thus needs a larger logit error than the tolerance assumes, or more frequent cuts elsewhere; p bounds neither of them.
    Effect: largest difference. Impossible tokens are left to `support_check`.
    """
    possible = ~draws.impossible
    gaps = np.abs(returned - draws.log_prob)[possible]
    near, far = (np.broadcast_to(bound, len(draws))[possible] for bound in (tolerance, np.add(tolerance, edge)))
    cut_elsewhere = int((gaps > near).sum())
    # Written so that NaN fails.
    p = float(stats.binom.sf(cut_elsewhere - 1, len(gaps), EDGE_SHARE)) if (gaps <= far).all() else 0.0
    return CheckResult("returned log-probs", setting, len(draws), float(gaps.max(initial=0.0)), "nats", p)


def log_prob_tolerance(sampling: SamplingParams, logit_error: float) -> tuple[float, float]:
    """Return (nats by which a returned log-prob may differ, nats more where the engine truncates elsewhere).

    A logit error changes a log-prob by up to twice itself. Where top-p cuts one token later, the probability left grows to
    at most 1, from at least top_p. Top-k keeps all tokens whose logit equals the k-th, in vLLM too: a tie that only one of
    the two keeps is a token with at most 1/k of what the other keeps. Both are rare with small errors, and common from
    RARE_EDGES on. The temperature must not be 0.
    """
    edge = -math.log(sampling.top_p) + (math.log1p(1 / sampling.top_k) if sampling.top_k > 0 else 0.0)
    error = 2 * logit_error / sampling.temperature
    return (error, edge) if logit_error < RARE_EDGES else (error + edge, 0.0)


def response_strata(steps: Sequence[tuple[int, int]], num_tokens: int) -> list[str]:
    """The place of each of a response's tokens in its verification step: "undrafted", "drafted 1" .. "k", or "bonus".

    steps: (draft tokens, accepted ones) of each step that vLLM recorded. "drafted j" was emitted where draft token j
    was verified, accepted or not. Tokens may be grouped only by what was decided before they were sampled, such as the
    number of draft tokens accepted before them in the step; then they have the target's distribution. Grouped by whether
    they were accepted, they would have the distributions min(p, q) and max(p - q, 0), up to a factor.

    vLLM 0.32 (Scheduler.update_from_output) records a step only if it verified draft tokens, before it cuts the last
    one at the end of the response. Prefill emits one token without a record, and so does every step without drafts: with
    draft length 0, after a preemption, or when the drafter was skipped. If such steps lie between recorded ones, nobody can
    tell where; then all tokens are "unknown". Raises ValueError when steps continue after the response.
    """
    emitted = [1, *(accepted + 1 for _, accepted in steps)]
    if steps and sum(emitted) < num_tokens:
        return [UNKNOWN] * num_tokens
    if steps and sum(emitted[:-1]) >= num_tokens:
        raise ValueError(f"verification steps go on after the {num_tokens} tokens of the response: {list(steps)}")
    strata = [UNDRAFTED] if steps else [UNDRAFTED] * num_tokens
    for drafted, accepted in steps:
        strata += [f"drafted {j + 1}" for j in range(accepted)]
        strata.append(BONUS if accepted == drafted else f"drafted {accepted + 1}")
    return strata[:num_tokens]


def by_stratum(draws: Draws, strata: NDArray[np.str_]) -> dict[str, Draws]:
    """The draws of each known stratum that has at least LEAST_TOKENS of them; strata: [N] names."""
    names, counts = np.unique(strata, return_counts=True)
    large = [str(n) for n, count in zip(names, counts, strict=True) if count >= LEAST_TOKENS and n != UNKNOWN]
    return {name: draws.select(strata == name) for name in large}
