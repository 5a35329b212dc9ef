"""The objective at one row: the drafter's distribution is compared with the target's, and the gradient is taken.

A draft token is accepted with probability

    alpha = sum_v min(p(v), q(v))     when the engine samples its drafts ("probabilistic"), and
    alpha = p(argmax q)               when it takes the likeliest token ("greedy"; always at temperature 0),

where p is the target's processed distribution over its whole vocabulary (Leviathan et al., 2023). Mass of p outside
the draft vocabulary is a rejection: p is never renormalised. argmax has no gradient, so that greedy drafts are trained
on the acceptance of a draft sampled from q, sum_v p(v) q(v), which is p(argmax q) once q is peaked.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import SamplingParams
from drafters.config import ObjectiveConfig

KL_DECAY = 3.0
"""How fast lk_hybrid moves from cross-entropy to acceptance; the value of arXiv 2602.23881."""


class Comparison(NamedTuple):
    """R rows of drafter logits against the target."""

    loss: Tensor  # [R]
    acceptance: Tensor  # [R] alpha, over all tokens the target may draw
    drawn_accepted: Tensor  # [R] probability that the token the target did draw was an accepted draft
    gradient: Tensor | None  # [R, V_draft] of the loss by the logits


def compare(
    p: Tensor, logits: Tensor, drawn: Tensor, sampling: SamplingParams, objective: ObjectiveConfig, with_gradient: bool
) -> Comparison:
    """Compare drafter logits [R, V_draft] with p [R, V_draft]; both may be overwritten.

    drawn [R]: draft id of the token the rollout goes on with, -1 outside the draft vocabulary. Given that token x, it
    was an accepted draft with probability min(1, q(x)/p(x)), or for greedy drafts if x = argmax q.
    """
    greedy = sampling.draft_sample_method == "greedy" or sampling.temperature == 0
    temperature = sampling.temperature or 1.0
    log_q = logits.div_(temperature)
    log_q.sub_(log_q.logsumexp(-1, keepdim=True))
    cross_entropy = -torch.einsum("rv,rv->r", p, log_q) if objective.type != "lk_likelihood" else None
    in_vocabulary = drawn >= 0
    token = drawn.clamp(min=0)[:, None]
    likeliest = log_q.argmax(-1, keepdim=True) if greedy else None
    q = log_q.exp_()
    if likeliest is not None:
        acceptance = p.gather(1, likeliest).squeeze(1)
        drawn_accepted = (likeliest == token).squeeze(1) & in_vocabulary
        trained = torch.einsum("rv,rv->r", p, q)
    else:
        acceptance = trained = torch.minimum(p, q).sum(-1)
        tiny = torch.finfo(p.dtype).tiny
        drawn_accepted = (q.gather(1, token) / p.gather(1, token).clamp(min=tiny)).clamp(max=1).squeeze(1)
        drawn_accepted = drawn_accepted * in_vocabulary
    if objective.type == "soft_cross_entropy":
        assert cross_entropy is not None
        loss, of_cross_entropy, of_acceptance = cross_entropy, torch.ones_like(trained), None
    elif objective.type == "lk_hybrid":
        assert cross_entropy is not None
        of_cross_entropy = torch.exp(-KL_DECAY * trained)
        of_acceptance = 1 - of_cross_entropy
        loss = of_cross_entropy * cross_entropy + of_acceptance * (1 - trained)
    else:
        trained = trained.clamp(min=torch.finfo(p.dtype).eps)
        loss, of_cross_entropy, of_acceptance = -trained.log(), None, 1 / trained
    gradient = None
    if with_gradient:
        gradient = _gradient(p, q, of_cross_entropy, of_acceptance, greedy).div_(temperature)
    return Comparison(loss, acceptance, drawn_accepted.to(p.dtype), gradient)


def _gradient(
    p: Tensor, q: Tensor, of_cross_entropy: Tensor | None, of_acceptance: Tensor | None, greedy: bool
) -> Tensor:
    """d/dz of the row weights [R] times cross-entropy and minus acceptance, at z = temperature x logits.

    Cross-entropy: q sum(p) - p. Acceptance sum_v f(v) q(v) has the gradient q (g - E_q[g]) with g = 1[q < p] for
    sum min(p, q), and g = p for sum p q. p and q are overwritten.
    """
    slope = None
    if of_acceptance is not None:
        g = p if greedy else (q < p).to(q.dtype)
        slope = q * (g - torch.einsum("rv,rv->r", g, q)[:, None])
        slope.mul_(of_acceptance[:, None])
    if of_cross_entropy is None:
        assert slope is not None
        return slope.neg_()
    gradient = q.mul_(p.sum(-1, keepdim=True)).sub_(p).mul_(of_cross_entropy[:, None])
    return gradient if slope is None else gradient.sub_(slope)
