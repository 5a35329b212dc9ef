"""Soft cross-entropy of the draft positions against the target's processed distribution.

The target's distribution over its whole vocabulary costs more than everything else, and its row r serves draft
position 0 of start r-1, position 1 of start r-2 and so on. So the outer loop runs over chunks of target rows and the
inner one over draft positions, gradients are taken on the spot, and nothing of size rows x vocabulary outlives a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.alignment import Alignment
from drafters.base import Sampler


@dataclass(frozen=True)
class Teacher:
    """The target's final hidden states, its head, and what of its distribution the drafter can propose."""

    final_hidden: Tensor  # [N, H]
    head: Tensor  # [V, H]
    draft_to_target: Tensor  # [V_draft] ascending target ids
    sampler: Sampler

    def probabilities(self, rows: Tensor) -> Tensor:
        """Processed probabilities [R, V_draft] of the draft vocabulary at batch rows [R].

        Rows sum to less than 1: the rest is the mass of tokens the drafter cannot propose, hence a certain rejection.
        """
        logits = _at_least_float32(self.final_hidden[rows].to(self.head.dtype) @ self.head.T)
        if self.sampler.temperature == 0:
            return (logits.argmax(-1, keepdim=True) == self.draft_to_target).to(logits.dtype)
        logits = truncate(logits.div_(self.sampler.temperature), self.sampler.top_k, self.sampler.top_p)
        normaliser = logits.logsumexp(-1, keepdim=True)
        return logits[:, self.draft_to_target].sub_(normaliser).exp_()


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [R, V] with -inf outside the top-k and then the top-p set, in vLLM's order and with its ties.

    Formula: vLLM v1/sample/ops/topk_topp_sampler.py. top_k 0 and top_p 1 are off.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[:, -1] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits


def soft_cross_entropy(
    hidden: Sequence[Tensor],
    draft_head: Tensor,
    teacher: Teacher,
    alignment: Alignment,
    depth_decay: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, loss of each draft position [K], and acceptance probabilities [K, S] (NaN where not supervised).

    hidden: K tensors [S, H], what the drafter's head [V_draft, H] reads for each start. Position k costs
    -sum_v p_T(v) log q_T(v) over the draft vocabulary, averaged over its supervised starts; the loss weights
    positions by depth_decay**k, normalised to sum 1. Both sides are at the rollout temperature, which is what vLLM's
    drafter applies; at temperature 0 the drafter's logits are taken as they are. Acceptance follows the engine:
    p_T(argmax q) for greedy drafts, sum_v min(p_T(v), q_T(v)) for probabilistic ones (always greedy at temperature 0).
    Only `loss` is differentiable, with respect to `hidden` and `draft_head`.
    """
    weights = [depth_decay**k for k in range(len(hidden))]
    weights = [weight / sum(weights) for weight in weights]
    with_gradients = torch.is_grad_enabled()
    return _SoftCrossEntropy.apply(teacher, alignment, weights, chunk_tokens, with_gradients, draft_head, *hidden)


class _SoftCrossEntropy(torch.autograd.Function):
    """Takes the gradients in the forward pass, so that logits need neither be kept nor computed twice."""

    @staticmethod
    def forward(ctx, teacher, alignment, weights, chunk_tokens, with_gradients, draft_head, *hidden):
        depth = len(hidden)
        supervised = [alignment.supervised[k].nonzero().squeeze(1) for k in range(depth)]
        target_rows = [alignment.target_rows(k) for k in range(depth)]
        precision = torch.promote_types(draft_head.dtype, torch.float32)
        per_position = draft_head.new_zeros(depth, dtype=precision)
        acceptance = draft_head.new_full(alignment.supervised.shape, torch.nan, dtype=precision)
        gradients = [torch.zeros_like(tensor) for tensor in (draft_head, *hidden)] if with_gradients else []

        all_rows = torch.cat(target_rows).unique()
        for first in range(0, len(all_rows), chunk_tokens):
            rows = all_rows[first : first + chunk_tokens]
            p = teacher.probabilities(rows)
            bounds = torch.stack([rows[0], rows[-1] + 1])
            for k in range(depth):
                begin, end = torch.searchsorted(target_rows[k], bounds).tolist()
                if begin == end:
                    continue
                starts = supervised[k][begin:end]
                p_k = p[torch.searchsorted(rows, target_rows[k][begin:end])]
                states = hidden[k][starts]
                loss, accepted, logit_gradient = _compare(p_k, states @ draft_head.T, teacher.sampler, with_gradients)
                per_position[k] += loss / len(supervised[k])
                acceptance[k, starts] = accepted
                if logit_gradient is not None:
                    logit_gradient = logit_gradient.mul_(weights[k] / len(supervised[k])).to(draft_head.dtype)
                    gradients[0].addmm_(logit_gradient.T, states)
                    gradients[1 + k][starts] = logit_gradient @ draft_head

        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(per_position, acceptance)
        loss = sum(weight * position for weight, position in zip(weights, per_position, strict=True))
        return loss, per_position, acceptance

    @staticmethod
    def backward(ctx, loss_gradient, *_):
        return (None,) * 5 + tuple(gradient * loss_gradient for gradient in ctx.saved_tensors)


def _compare(p: Tensor, logits: Tensor, sampler: Sampler, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Summed loss, acceptance [R], and the loss's gradient by the logits [R, V_draft]. Overwrites its inputs."""
    greedy = sampler.draft_sample_method == "greedy" or sampler.temperature == 0
    temperature = sampler.temperature or 1.0
    log_q = _at_least_float32(logits).div_(temperature)
    log_q.sub_(log_q.logsumexp(-1, keepdim=True))
    loss = -torch.einsum("rv,rv->", p, log_q)
    if greedy:
        accepted = p.gather(1, log_q.argmax(-1, keepdim=True)).squeeze(1)
        if not with_gradient:
            return loss, accepted, None
    q = log_q.exp_()
    if not greedy:
        accepted = torch.minimum(p, q).sum(-1)
    # d loss / d logits = (q sum(p) - p) / T; sum(p) is the mass that the draft vocabulary holds.
    gradient = q.mul_(p.sum(-1, keepdim=True)).sub_(p).div_(temperature) if with_gradient else None
    return loss, accepted, gradient


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
