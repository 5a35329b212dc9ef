"""Advantages, policy-gradient losses over response tokens, and the metrics of a policy step.

Every loss works on flat tensors: N response tokens of S rollouts one after the other, sequence_ids [N] saying
which rollout each token belongs to. A loss is sum_n weight_n * loss_n, with weights that already carry the
normalisation over the whole minibatch, so micro-batches and ranks just add up.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from cotrain.config.schema import PolicyConfig
from cotrain.policy.batching import MicroBatch

MAX_LOG_RATIO = 20.0  # bound of |log pi_old - log pi_engine|, so that the ratio of the two and its mean stay finite


def loss_denominator(config: PolicyConfig, lengths: Sequence[int], max_new_tokens: int) -> int:
    """Return what the losses of a minibatch are divided by; `lengths` are the response tokens of its rollouts.

    token_mean:           num_tokens                                            (DAPO, arXiv:2503.14476)
    seq_mean_token_mean:  num_sequences, and each token by its rollout's length (GRPO, arXiv:2402.03300)
    seq_mean_token_sum:   num_sequences * max_new_tokens                        (Dr. GRPO, arXiv:2503.20783)
    """
    if config.loss_aggregation == "token_mean":
        return sum(lengths)
    return len(lengths) * (max_new_tokens if config.loss_aggregation == "seq_mean_token_sum" else 1)


def _behaviour_weights(config: PolicyConfig, old_log_probs: Tensor, behaviour_log_probs: Tensor) -> dict[str, Tensor]:
    """Return metric values [N]; behaviour_weight_mean corrects each token's loss for sampling by the engine, not pi_old.

    With w = pi_old / pi_engine of each token (the decoupled objective: Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298):

    truncate: min(w, cap)                   (truncated importance sampling: Ionides, 2008; V-trace, arXiv:1802.01561)
    mask:     w if 1/cap <= w <= cap else 0 (IcePop: Ring-1T, arXiv:2510.18855)

    As long as no weight is bounded, the expected weighted loss under the engine equals the expected loss under pi_old.
    """
    ratio = (old_log_probs - behaviour_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    limited, name = ratio > config.behaviour_cap, "behaviour_capped"
    if config.behaviour_correction == "truncate":
        weight = ratio.clamp(max=config.behaviour_cap)
    else:
        name = "behaviour_masked"
        limited |= ratio < 1 / config.behaviour_cap
        # Multiply instead of selecting, so that a ratio of NaN shows in the loss.
        weight = ratio * ~limited
    return {
        "behaviour_ratio_mean": ratio,
        "behaviour_weight_mean": weight,
        "behaviour_weight_square": weight.double().square(),
        name: limited,  # the share of tokens whose weight is not their ratio
    }


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimate KL(pi || reference) at each sampled token [N]: exp(-d) - 1 + d with d = log pi - log reference.

    This is the estimator k3 of http://joschu.net/blog/kl-approx.html, which GRPO uses (arXiv:2402.03300).
    """
    difference = log_probs - reference_log_probs
    return torch.expm1(-difference) + difference


def policy_loss(
    config: PolicyConfig, denominator: int, batch: MicroBatch, log_probs: Tensor, reference_log_probs: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate plus KL penalty of one micro-batch's tokens [N].

    surrogate = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio = pi / pi_old of the token, or its
    geometric mean over the rollout if importance_ratio is "sequence" (GSPO, arXiv:2507.18071). A behaviour correction multiplies
    the surrogate by each token's weight and leaves the KL penalty alone. The denominator (`loss_denominator`) also counts tokens
    whose weight is 0; otherwise each masked token would raise the weight of the others. Returns the loss of each token, whose
    sum is this micro-batch's part of the minibatch's loss, and detached values [N] for the metrics.
    """
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    log_ratio = log_probs - old_log_probs
    if config.importance_ratio == "sequence":
        sums = torch.zeros(len(batch.lengths), dtype=log_ratio.dtype, device=log_ratio.device)
        log_ratio = (sums.index_add(0, batch.sequence_ids, log_ratio) / batch.lengths)[batch.sequence_ids]
    ratio = log_ratio.exp()
    plain = ratio * batch.advantages
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * batch.advantages
    per_token = -torch.minimum(plain, clipped)
    values = {"clip_fraction": clipped < plain, "ratio_max": ratio.detach()}
    if config.behaviour_correction is not None:
        values |= _behaviour_weights(config, old_log_probs, batch.behaviour_log_probs)
        per_token = per_token * values["behaviour_weight_mean"]
    if reference_log_probs is not None:
        kl_reference = kl_estimate(log_probs, reference_log_probs)
        per_token = per_token + config.kl_coefficient * kl_reference
        values["kl_reference"] = kl_reference.detach()
    lengths = batch.lengths[batch.sequence_ids] if config.loss_aggregation == "seq_mean_token_mean" else 1
    weights = torch.ones(len(per_token), device=per_token.device) / (denominator * lengths)
    return per_token * weights, values


STD_EPSILON = 1e-6  # added to the standard deviation; rewards that differ by no more than this count as equal


def group_advantages(rewards: Sequence[float], kind: Literal["group_mean", "group_mean_std"]) -> list[float]:
    """Return the advantage of each sample of a group, from the rewards r of all its samples.

    group_mean:      A_i = r_i - mean(r)                            (Dr. GRPO, arXiv:2503.20783)
    group_mean_std:  A_i = (r_i - mean(r)) / (std(r) + 1e-6)        (GRPO, arXiv:2402.03300)

    std is the sample standard deviation (n - 1). A group whose rewards are all equal teaches nothing and gets exactly 0.
    """
    if max(rewards) - min(rewards) <= STD_EPSILON:
        return [0.0] * len(rewards)
    mean, scale = fmean(rewards), stdev(rewards) + STD_EPSILON if kind == "group_mean_std" else 1.0
    return [(reward - mean) / scale for reward in rewards]


def step_metrics(
    values: Sequence[Mapping[str, Tensor]], steps: Sequence[tuple[float, float, float]], accelerator: Accelerator
) -> dict[str, float]:
    """Return the metrics under their logged names, the same on every rank. All ranks must call it.

    values: named values [N] of each of this rank's micro-batches. The mean over all tokens is logged, if there are any, and the
    maximum of ratio_max. steps: loss, gradient norm and learning rate of each optimizer step, the same on every rank.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for of_batch in values:
        for name, tensor in of_batch.items():
            sums[name][0] += float(tensor.double().sum())
            sums[name][1] += tensor.numel()
    sums.pop("ratio_max")
    names = sorted(sums)
    local = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=accelerator.device)
    totals = accelerator.reduce(local, "sum")
    metrics = {
        f"policy/{name}": float(total / count) for name, (total, count) in zip(names, totals, strict=True) if count
    }
    square = metrics.pop("policy/behaviour_weight_square", None)
    if square is not None:
        # Kish's effective sample size as a share of the tokens: (sum w)^2 / (N sum w^2).
        metrics["policy/behaviour_ess"] = metrics["policy/behaviour_weight_mean"] ** 2 / square if square else 0.0
    largest = torch.cat([of_batch["ratio_max"] for of_batch in values]).max()
    losses, grad_norms, learning_rates = zip(*steps, strict=True)
    return {
        **metrics,
        "policy/loss": sum(losses) / len(losses),
        "policy/grad_norm": sum(grad_norms) / len(grad_norms),
        "policy/ratio_max": float(accelerator.gather(largest[None]).max()),
        "policy/learning_rate": learning_rates[-1],
    }


BY_LAG = {"kl": "behaviour_kl", "rollout_log_prob_gap": "rollout_log_prob_gap"}
"""Values also logged per lag, with metric names. Lag 0 shows how far engine and learner differ, higher lags what lag adds."""


def by_lag(values: Mapping[str, Tensor], lags: Tensor, largest: int) -> dict[str, Tensor]:
    """Return the values of BY_LAG split by lag, 0 to `largest`; lags [N] is the lag of each token."""
    lags = lags.to(values["kl"].device)
    every = range(largest + 1)
    return {f"{name}_lag_{lag}": values[key][lags == lag] for key, name in BY_LAG.items() for lag in every}
