"""Policy-gradient losses over response tokens.

Every function works on flat tensors: N response tokens of S rollouts one after the other, sequence_ids [N] saying
which rollout each token belongs to. A loss is sum_n weight_n * loss_n, with weights that already carry the
normalisation over the whole minibatch, so micro-batches and ranks just add up.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cotrain.config.schema import PolicyConfig
from cotrain.policy.batching import MicroBatch

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]

MAX_LOG_RATIO = 20.0
"""Bound of |log pi_old - log pi_engine|, so that the ratio of the two and its mean stay finite."""


@dataclass(frozen=True)
class Normaliser:
    """Denominators of one minibatch, over all micro-batches and all ranks."""

    num_tokens: int
    """Response tokens."""
    num_sequences: int
    max_new_tokens: int

    def token_weights(self, lengths: Tensor, aggregation: Aggregation) -> Tensor:
        """Weight of each response token [N], for rollouts of `lengths` [S] response tokens.

        token_mean:           1 / num_tokens                           (DAPO, arXiv:2503.14476)
        seq_mean_token_mean:  1 / (num_sequences * length_s)           (GRPO, arXiv:2402.03300)
        seq_mean_token_sum:   1 / (num_sequences * max_new_tokens)     (Dr. GRPO, arXiv:2503.20783)
        """
        lengths_per_token = lengths.repeat_interleave(lengths)
        ones = torch.ones(len(lengths_per_token), device=lengths.device)
        if aggregation == "token_mean":
            return ones / self.num_tokens
        if aggregation == "seq_mean_token_mean":
            return ones / (self.num_sequences * lengths_per_token)
        return ones / (self.num_sequences * self.max_new_tokens)


def importance_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    sequence_ids: Tensor,
    lengths: Tensor,
    kind: Literal["token", "sequence"],
) -> Tensor:
    """pi / pi_old of each response token [N].

    sequence (GSPO, arXiv:2507.18071): the geometric mean over the rollout, the same for each of its tokens.
    """
    log_ratio = log_probs - old_log_probs
    if kind == "sequence":
        sums = torch.zeros(len(lengths), dtype=log_ratio.dtype, device=log_ratio.device)
        log_ratio = (sums.index_add(0, sequence_ids, log_ratio) / lengths)[sequence_ids]
    return log_ratio.exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss of each token [N], and where the clip took its gradient away [N] bool.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    """
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


@dataclass(frozen=True)
class BehaviourWeights:
    """How N tokens count that the engine drew and the learner would have drawn more or less often; has no gradient."""

    ratio: Tensor  # [N] pi_old / pi_engine
    weight: Tensor  # [N] what multiplies the loss of the token
    limited: Tensor  # [N] bool, is the weight not the ratio?


def behaviour_weights(config: PolicyConfig, old_log_probs: Tensor, behaviour_log_probs: Tensor) -> BehaviourWeights:
    """Weights that correct for tokens drawn from the engine's policy instead of pi_old.

    With w = pi_old / pi_engine of the token (the decoupled objective: Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298):

    truncate: min(w, cap)                   (truncated importance sampling: Ionides, 2008; V-trace, arXiv:1802.01561)
    mask:     w if 1/cap <= w <= cap else 0 (IcePop: Ring-1T, arXiv:2510.18855)

    The expectation of the weighted loss under the engine is that of the loss under pi_old as far as no bound is met.
    """
    ratio = (old_log_probs - behaviour_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    limited = ratio > config.behaviour_cap
    if config.behaviour_correction == "truncate":
        return BehaviourWeights(ratio, ratio.clamp(max=config.behaviour_cap), limited)
    limited = limited | (ratio < 1 / config.behaviour_cap)
    # A product and no selection: a ratio that is not a number has to show in the loss.
    return BehaviourWeights(ratio, ratio * ~limited, limited)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Estimate KL(pi || reference) at each sampled token [N]: exp(-d) - 1 + d with d = log pi - log reference.

    This is the estimator k3 of http://joschu.net/blog/kl-approx.html, which GRPO uses (arXiv:2402.03300).
    """
    difference = log_probs - reference_log_probs
    return torch.expm1(-difference) + difference


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of one micro-batch and what it is made of; all but loss are detached."""

    loss: Tensor  # scalar: this micro-batch's part of the minibatch's loss
    per_token: Tensor  # [N], weighted: sums to loss
    ratio: Tensor  # [N]
    clipped: Tensor  # [N] bool
    behaviour: BehaviourWeights | None  # with config.behaviour_correction
    kl_reference: Tensor | None  # [N]


def policy_loss(
    config: PolicyConfig,
    normaliser: Normaliser,
    batch: MicroBatch,
    log_probs: Tensor,
    reference_log_probs: Tensor | None,
) -> PolicyLoss:
    """Clipped surrogate plus KL penalty of one micro-batch; log_probs [N] and reference_log_probs [N] of its tokens.

    A behaviour correction multiplies the surrogate of each token by its weight. The denominators go on counting the
    tokens whose weight is 0, because the others would grow with every token that is masked. The KL penalty is not
    weighted.
    """
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    ratio = importance_ratio(log_probs, old_log_probs, batch.sequence_ids, batch.lengths, config.importance_ratio)
    per_token, clipped = clipped_surrogate(ratio, batch.advantages, config.clip_low, config.clip_high)
    behaviour = None
    if config.behaviour_correction != "none":
        behaviour = behaviour_weights(config, old_log_probs, batch.behaviour_log_probs)
        per_token = per_token * behaviour.weight
    kl_reference = None
    if reference_log_probs is not None:
        kl_reference = kl_estimate(log_probs, reference_log_probs)
        per_token = per_token + config.kl_coefficient * kl_reference
        kl_reference = kl_reference.detach()
    per_token = per_token * normaliser.token_weights(batch.lengths, config.loss_aggregation)
    return PolicyLoss(per_token.sum(), per_token.detach(), ratio.detach(), clipped, behaviour, kl_reference)
