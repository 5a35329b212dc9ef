"""The objective at one row: the drafter's distribution is compared with the target's, and the gradient is taken.

docs/drafters.md gives the acceptance probability alpha of a draft token, and the objectives. Mass of p outside the draft
vocabulary is a rejection: p is never renormalised. argmax has no gradient, so that greedy drafts are trained on the
acceptance of a draft sampled from q, sum_v p(v) q(v), which is p(argmax q) once q is peaked.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import SamplingParams
from drafters.config import ObjectiveConfig

KL_DECAY = 3.0
"""How fast lk_hybrid moves from cross-entropy to acceptance; the value of its paper."""


class Comparison(NamedTuple):
    """R rows of drafter logits against the target."""

    loss: Tensor  # [R]
    accepted: Tensor  # [2, R] alpha, over all tokens the target may draw, and for the token that it did draw
    gradient: Tensor | None  # [R, V_draft] of the loss by the logits


def compare(
    p: Tensor, logits: Tensor, drawn: Tensor, sampling: SamplingParams, objective: ObjectiveConfig, with_gradient: bool
) -> Comparison:
    """Compare drafter logits [R, V_draft] with p [R, V_draft]; both may be overwritten.

    drawn [R]: draft id of the token the rollout goes on with, -1 outside the draft vocabulary. Given that token x, it
    was an accepted draft with probability min(1, q(x)/p(x)), or for greedy drafts if x = argmax q. lk_hybrid weighs
    cross-entropy with exp(-KL_DECAY alpha) and 1 - alpha with the rest (arXiv 2602.23881).
    """
    greedy = sampling.draft_sample_method == "greedy" or sampling.temperature == 0
    temperature = sampling.temperature or 1.0
    log_q = logits.div_(temperature)
    log_q.sub_(log_q.logsumexp(-1, keepdim=True))
    cross_entropy = -torch.einsum("rv,rv->r", p, log_q)
    token = drawn.clamp(min=0)[:, None]
    if greedy:
        likeliest = log_q.argmax(-1, keepdim=True)
        q = log_q.exp_()
        alpha, trained = p.gather(1, likeliest).squeeze(1), torch.einsum("rv,rv->r", p, q)
        alpha_drawn = (likeliest == token).to(p.dtype)
    else:
        q = log_q.exp_()
        alpha = trained = torch.minimum(p, q).sum(-1)
        alpha_drawn = (q.gather(1, token) / p.gather(1, token).clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1)
    accepted = torch.stack([alpha, alpha_drawn.squeeze(1) * (drawn >= 0)])
    share = torch.exp(-KL_DECAY * trained) if objective.type == "lk_hybrid" else torch.ones_like(trained)
    loss = share * cross_entropy + (1 - share) * (1 - trained)
    gradient = _gradient(p, q, share, greedy).div_(temperature) if with_gradient else None
    return Comparison(loss, accepted, gradient)


def _gradient(p: Tensor, q: Tensor, share: Tensor, greedy: bool) -> Tensor:
    """d/dz of share [R] x cross-entropy - (1 - share) x acceptance, at z = temperature x logits; p and q are overwritten.

    Cross-entropy: q sum(p) - p. Acceptance sum_v f(v) q(v) has the gradient q (g - E_q[g]) with g = 1[q < p] for
    sum min(p, q), and g = p for sum p q.
    """
    g = p if greedy else (q < p).to(q.dtype)
    slope = (q * (g - torch.einsum("rv,rv->r", g, q)[:, None])).mul_((1 - share)[:, None])
    return q.mul_(p.sum(-1, keepdim=True)).sub_(p).mul_(share[:, None]).sub_(slope)
