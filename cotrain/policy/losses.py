"""Advantages, the policy-gradient loss of response tokens, and the metrics of a policy step.

The loss works on flat tensors of N response tokens, the rollouts of a micro-batch one after the other. It is normalised over
the response tokens of the whole step (token mean, as in DAPO, arXiv:2503.14476), so micro-batches and ranks just add up.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import torch
from accelerate import Accelerator
from torch import Tensor

from cotrain.config.schema import PolicyConfig
from cotrain.policy.batching import MicroBatch

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""The importance ratio is clipped at 1 - CLIP_LOW and at 1 + CLIP_HIGH, the values of DAPO's clip-higher."""

MAX_WEIGHT = 2.0
"""Largest weight of a token under a behaviour correction."""

MAX_LOG_RATIO = 20.0
"""Bound of |log pi_old - log pi_engine|, so that the ratio of the two and its mean stay finite."""

WEIGHT_SQUARE = "behaviour_weight_square"


def _behaviour_weights(log_probs: Tensor, behaviour_log_probs: Tensor) -> dict[str, Tensor]:
    """Return metric values [N]; behaviour_weight_mean corrects each token's loss for sampling by the engine, not by pi.

    It is min(w, MAX_WEIGHT) with w = pi / pi_engine of each token (truncated importance sampling: Ionides, 2008; V-trace,
    arXiv:1802.01561; the decoupled objective: Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298). As long as no weight is
    truncated, the expected weighted loss under the engine equals the expected loss under pi.
    """
    ratio = (log_probs - behaviour_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(max=MAX_WEIGHT)
    return {
        "behaviour_ratio_mean": ratio,
        "behaviour_weight_mean": weight,
        WEIGHT_SQUARE: weight.double().square(),
        "behaviour_capped": ratio > MAX_WEIGHT,
    }


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimate KL(pi || reference) at each sampled token [N]: exp(-d) - 1 + d with d = log pi - log reference.

    This is the estimator k3 of http://joschu.net/blog/kl-approx.html, which GRPO uses (arXiv:2402.03300).
    """
    difference = log_probs - reference_log_probs
    return torch.expm1(-difference) + difference


def policy_loss(
    config: PolicyConfig, num_tokens: int, batch: MicroBatch, log_probs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate of one micro-batch's tokens [N].

    surrogate = -min(ratio * A, clip(ratio) * A), where ratio = pi / pi_old of the token. pi_old is the engine's or, with
    old_log_probs = "recomputed", that of this forward pass, so that the ratio is 1 and only its gradient counts. A behaviour
    correction multiplies the surrogate by each token's weight. num_tokens: response tokens of the step. Returns the loss of each token, whose sum is this micro-batch's part of the step's loss, and detached values [N] for
    the metrics.
    """
    old_log_probs = log_probs.detach() if config.old_log_probs == "recomputed" else batch.behaviour_log_probs
    ratio = (log_probs - old_log_probs).exp()
    plain = ratio * batch.advantages
    clipped = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH) * batch.advantages
    per_token = -torch.minimum(plain, clipped)
    values = {"clip_fraction": clipped < plain, "ratio_max": ratio.detach()}
    if config.behaviour_correction is not None:
        values |= _behaviour_weights(old_log_probs, batch.behaviour_log_probs)
        per_token = per_token * values["behaviour_weight_mean"]
    return per_token * (1 / num_tokens), values


STD_EPSILON = 1e-6
"""Added to the standard deviation; rewards that differ by no more than this count as equal."""


def group_advantages(group_ids: Sequence[str], rewards: Sequence[float]) -> list[float]:
    """Return the advantage of each rollout, in the order given: (r - mean(r)) / (std(r) + 1e-6) (GRPO, arXiv:2402.03300).

    A group is all rollouts with the same group id; std is the sample standard deviation (n - 1). A group whose
    rewards are all equal teaches nothing and gets exactly 0.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for group_id, reward in zip(group_ids, rewards, strict=True):
        groups[group_id].append(reward)
    differ = {group_id: max(group) - min(group) > STD_EPSILON for group_id, group in groups.items()}
    scale = {
        group_id: (fmean(group), stdev(group) + STD_EPSILON) for group_id, group in groups.items() if differ[group_id]
    }
    return [(r - scale[g][0]) / scale[g][1] if differ[g] else 0.0 for g, r in zip(group_ids, rewards, strict=True)]


def step_metrics(
    values: Sequence[Mapping[str, Tensor]], of_step: dict[str, float], accelerator: Accelerator
) -> dict[str, float]:
    """Return the metrics under their logged names, the same on every rank. All ranks must call it.

    values: named values [N] of each of this rank's micro-batches. The mean over all tokens is logged, if there are any, and the
    maximum of ratio_max. of_step: loss, gradient norm and learning rate, the same on every rank.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for of_batch in values:
        for name, tensor in of_batch.items():
            sums[name][0] += float(tensor.double().sum())
            sums[name][1] += tensor.numel()
    sums.pop("ratio_max")
    names = sorted(sums)
    local = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=accelerator.device)
    totals = dict(zip(names, accelerator.reduce(local, "sum"), strict=True))
    means = {name: float(total / count) for name, (total, count) in totals.items() if count}
    square = means.pop(WEIGHT_SQUARE, None)
    if square is not None:
        # Kish's effective sample size as a share of the tokens: (sum w)^2 / (N sum w^2).
        means["behaviour_ess"] = means["behaviour_weight_mean"] ** 2 / square if square else 0.0
    largest = torch.cat([of_batch["ratio_max"] for of_batch in values]).max()
    means["ratio_max"] = float(accelerator.gather(largest[None]).max())
    return {f"policy/{name}": value for name, value in (means | of_step).items()}


BY_LAG = {"kl": "behaviour_kl", "rollout_log_prob_gap": "rollout_log_prob_gap"}
"""Values also logged per lag, with metric names. Lag 0 shows how far engine and learner differ, higher lags what lag adds."""


def by_lag(values: Mapping[str, Tensor], lags: Tensor, largest: int) -> dict[str, Tensor]:
    """Return the values of BY_LAG split by lag, 0 to `largest`; lags [N] is the lag of each token."""
    lags = lags.to(values["kl"].device)
    every = range(largest + 1)
    return {f"{name}_lag_{lag}": values[key][lags == lag] for key, name in BY_LAG.items() for lag in every}
