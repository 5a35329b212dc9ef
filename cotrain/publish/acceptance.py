"""Acceptance lengths that drafters are expected to reach, with their noise (docs/internals/publishing.md).

The noise of an acceptance length is estimated by leaving out one prompt at a time: the delete-one-group jackknife (Efron and
Stein, 1981; for ratios Cochran, Sampling Techniques, 6.17), with Student's t for one degree of freedom less than there are
prompts. Percentiles of a bootstrap would be too narrow with few prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from drafters.scores import RolloutAcceptance

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ExpectedAcceptance:
    """What a drafter is expected to reach on rollouts like those it was scored on, at each draft length 1 to K."""

    rates: Array
    """[K, K] share of verification steps with k + 1 draft tokens that accept position i + 1 and all before it; 0 for
    positions beyond the draft length."""
    without: Array  # [K, G] accepted draft tokens per such verification step, without each of the G prompts
    num_rollouts: int = 0

    @property
    def num_prompts(self) -> int:
        """G, the prompts that the drafter was scored on."""
        return self.without.shape[1]

    @property
    def lengths(self) -> Array:
        """[K + 1] acceptance length at draft lengths 0 to K."""
        return 1 + np.append(0.0, self.rates.sum(1))

    @property
    def longest(self) -> float:
        """Acceptance length with K draft tokens in every verification step."""
        return float(self.lengths[-1])

    # In the methods below, steps[k] is the number of verification steps with k + 1 draft tokens. All but `covers` require it.

    def covers(self, steps: Sequence[int]) -> bool:
        """Whether these verification steps have an expectation: there are some, and none has more than K draft tokens."""
        return any(steps) and not any(steps[len(self.rates) :])

    def rates_at(self, steps: Sequence[int]) -> Array:
        """[K] expected share of all these verification steps that accept a position and all before it."""
        return self._weights(steps) @ self.rates

    def length_at(self, steps: Sequence[int]) -> float:
        """Expected acceptance length over these verification steps."""
        return float(self._weights(steps) @ self.lengths[1:])

    def error_at(self, steps: Sequence[int]) -> float:
        """Standard error of `length_at`."""
        return _standard_error(self._weights(steps) @ self.without)

    def lowest_served(self, steps: Sequence[int], num_prompts: int, tolerance: float, chance: float) -> float:
        """Acceptance length below which so good a drafter falls only with probability `chance` (Satterthwaite's t).

        `tolerance` is the acceptance length that may be missing beyond noise. The noise of `num_prompts` served prompts has two
        parts: the variation between prompts, from the standard error of the expectation, and the chance in each acceptance,
        from the expected rates. The number A of accepted draft tokens has P(A >= k) = r_k, so E[A^2] = sum (2k - 1) r_k.
        """
        rates = self.rates_at(steps)
        between = self.error_at(steps) ** 2 * (1 + self.num_prompts / num_prompts)
        within = (rates @ np.arange(1, 2 * len(rates), 2) - rates.sum() ** 2) / sum(steps)
        variance = between + max(within, 0.0)
        freedom = (self.num_prompts - 1) * (variance / between) ** 2 if between else np.inf
        return self.length_at(steps) - tolerance - float(stdtrit(min(freedom, 1e9), 1 - chance)) * sqrt(variance)

    def metrics(self, steps: Sequence[int]) -> dict[str, float]:
        """Return what is expected at K draft tokens and, if these steps have an expectation, in them."""
        metrics = {"rollout/expected_acceptance_length_longest": self.longest}
        if self.covers(steps):
            metrics["rollout/expected_acceptance_length"] = self.length_at(steps)
            rates = enumerate(self.rates_at(steps).tolist(), start=1)
            metrics |= {f"rollout/expected_rate_pos_{k}": rate for k, rate in rates if any(steps[k - 1 :])}
        return metrics

    def _weights(self, steps: Sequence[int]) -> Array:
        counted = np.zeros(len(self.rates))
        counted[: len(steps)] = steps[: len(self.rates)]
        return counted / counted.sum()


def expected_of(
    scores: Sequence[RolloutAcceptance], prompts: Sequence[str], chosen: NDArray[np.bool_] | None = None
) -> ExpectedAcceptance | None:
    """Estimate what a drafter will reach from its scores on the same R rollouts at draft lengths 1 to K.

    Rollouts with a hole (missing hidden states) are left out; None if fewer than two prompts remain. prompts [R]: the prompt of
    each rollout. chosen [R]: use only these rollouts; None uses all of them.
    """
    whole = np.isfinite(scores[-1].steps) & (True if chosen is None else chosen)
    names, groups = np.unique(np.asarray(prompts)[whole], return_inverse=True)
    if len(names) < 2:
        return None
    rates, without = np.zeros((len(scores), len(scores))), np.zeros((len(scores), len(names)))
    for k, scored in enumerate(scores):
        steps, accepted = scored.steps[whole], scored.accepted[whole]
        rates[k, : k + 1] = accepted.sum(0) / max(steps.sum(), 1e-9)  # no step where this length was not served
        of_prompt = [np.bincount(groups, weights) for weights in (accepted.sum(1), steps)]
        without[k] = np.divide(of_prompt[0].sum() - of_prompt[0], np.maximum(of_prompt[1].sum() - of_prompt[1], 1e-9))
    return ExpectedAcceptance(rates, without, int(whole.sum()))


def gain_of(candidate: ExpectedAcceptance, serving: ExpectedAcceptance, confidence: float) -> tuple[float, float]:
    """Return the candidate's gain in acceptance length at K draft tokens, and the lower bound of the gain at this confidence.

    Both must have been scored on the same rollouts, so that what makes a prompt easy cancels out of the gain and its noise.
    """
    gain, error = candidate.longest - serving.longest, _standard_error(candidate.without[-1] - serving.without[-1])
    return gain, gain - float(stdtrit(candidate.num_prompts - 1, confidence)) * error


def _standard_error(without: Array) -> float:
    """Return the jackknife standard error; `without` [G] holds the value without each group, up to an added constant."""
    return sqrt((len(without) - 1) * without.var())
