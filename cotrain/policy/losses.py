"""Policy-gradient losses over response tokens.

Every function works on flat tensors: N response tokens of S rollouts one after the other, sequence_ids [N] saying
which rollout each token belongs to. A loss is sum_n weight_n * loss_n, with weights that already carry the
normalisation over the whole minibatch, so micro-batches and ranks just add up.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cotrain.config import PolicyConfig
from cotrain.policy.batching import MicroBatch

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
Estimator = Literal["k1", "k2", "k3"]


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


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: Estimator) -> Tensor:
    """KL(pi || reference) estimated at each sampled token [N] (http://joschu.net/blog/kl-approx.html).

    With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss, k1 has a gradient of zero
    mean and only adds noise; k2 has the gradient of the KL itself.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of one micro-batch and what it is made of; all but loss are detached."""

    loss: Tensor  # scalar: this micro-batch's part of the minibatch's loss
    per_token: Tensor  # [N], weighted: sums to loss
    ratio: Tensor  # [N]
    clipped: Tensor  # [N] bool
    kl_reference: Tensor | None  # [N], by config.kl_estimator


def policy_loss(
    config: PolicyConfig,
    normaliser: Normaliser,
    batch: MicroBatch,
    log_probs: Tensor,
    reference_log_probs: Tensor | None,
) -> PolicyLoss:
    """Clipped surrogate plus KL penalty of one micro-batch; log_probs [N] and reference_log_probs [N] of its tokens."""
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    ratio = importance_ratio(log_probs, old_log_probs, batch.sequence_ids, batch.lengths, config.importance_ratio)
    per_token, clipped = clipped_surrogate(ratio, batch.advantages, config.clip_low, config.clip_high)
    kl_reference = None
    if reference_log_probs is not None:
        kl_reference = kl_estimate(log_probs, reference_log_probs, config.kl_estimator)
        per_token = per_token + config.kl_coefficient * kl_reference
        kl_reference = kl_reference.detach()
    per_token = per_token * normaliser.token_weights(batch.lengths, config.loss_aggregation)
    return PolicyLoss(per_token.sum(), per_token.detach(), ratio.detach(), clipped, kl_reference)
