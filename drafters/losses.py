"""The training objective: at one row, and over all draft positions in chunks of target rows.

docs/guide/drafters.md defines the acceptance probability alpha of a draft token, and the objectives. Mass of the target's p outside
the draft vocabulary is a rejection: p is never renormalised. The argmax has no gradient, so greedy drafts are trained on
sum_v p(v) q(v), the mean of p(v) over drafts from the drafter's q, which approaches p(argmax q) as q gets peaked.

The target's distribution over its whole vocabulary costs more than everything else, and its row r is compared with draft
position 0 of start r-1, position 1 of start r-2 and so on. So the outer loop runs over chunks of target rows and the inner
one over draft positions, gradients are computed at once, and nothing of size rows x vocabulary outlives a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.acceptance import StartAcceptance
from drafters.alignment import Alignment, DraftBatch, align, beyond_stop, generated_before
from drafters.base import Drafter, SamplingParams, TargetWeights

KL_DECAY = 3.0
"""Rate at which the loss moves from cross-entropy to acceptance as alpha rises; the value of arXiv 2602.23881."""


class Comparison(NamedTuple):
    """How R rows of drafter logits compare with the target."""

    loss: Tensor  # [R]
    accepted: Tensor  # [2, R] acceptance probability: alpha, and that given the token the rollout drew
    gradient: Tensor | None  # [R, V_draft] of the loss with respect to the logits


def compare(p: Tensor, logits: Tensor, drawn: Tensor, sampling: SamplingParams, with_gradient: bool) -> Comparison:
    """Compare drafter logits [R, V_draft] with target probabilities p [R, V_draft]; both may be overwritten.

    drawn [R]: draft id of the token the rollout continues with, -1 outside the draft vocabulary. Given this token x, it
    was an accepted draft with probability min(1, q(x)/p(x)), or with greedy drafts exactly if x = argmax q. The loss
    weights cross-entropy with exp(-KL_DECAY alpha) and 1 - alpha with the rest (arXiv 2602.23881, lk_hybrid).
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
    share = torch.exp(-KL_DECAY * trained)
    loss = share * cross_entropy + (1 - share) * (1 - trained)
    gradient = _gradient(p, q, share, greedy).div_(temperature) if with_gradient else None
    return Comparison(loss, accepted, gradient)


def _gradient(p: Tensor, q: Tensor, share: Tensor, greedy: bool) -> Tensor:
    """Return d/dz of share [R] x cross-entropy - (1 - share) x acceptance, with z = logits / temperature. Overwrites q.

    Cross-entropy: q sum(p) - p. Acceptance: q (g - E_q[g]), with g = 1[q < p] for sum min(p, q) and g = p for
    greedy drafts, whose acceptance is sum p q here.
    """
    g = p if greedy else (q < p).to(q.dtype)
    slope = (q * (g - torch.einsum("rv,rv->r", g, q)[:, None])).mul_((1 - share)[:, None])
    return q.mul_(p.sum(-1, keepdim=True)).sub_(p).mul_(share[:, None]).sub_(slope)


CHUNK_TOKENS = 512  # rows whose logits are in memory at once. It bounds peak memory and never changes the result.


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at the rows of a batch, and its part in a drafter's vocabulary."""

    batch: DraftBatch
    target: TargetWeights
    draft_to_target: Tensor  # [V_draft] ascending target ids
    sampling: SamplingParams
    is_quick: bool = False  # whether to use the log-probabilities of the rollouts

    @cached_property
    def _own_head(self) -> Tensor:
        """The rows [V_draft, H] of the target's head for the draft vocabulary."""
        return self.target.head[self.draft_to_target]

    def from_log_probs(self, rows: Tensor) -> Tensor | None:
        """Return what `of_draft_vocabulary` does, at the price of the draft vocabulary's logits.

        The normaliser follows from the logit of the token that the target drew and its log-probability, which the engine has told. None
        where that is not known, sampling cuts tokens off, or the draft vocabulary is the target's. An engine in bfloat16
        rounds logits, so that a row may be off by a common factor of a few percent.
        """
        sampling, head, known = self.sampling, self.target.head, self.batch.log_probs
        cuts = sampling.temperature == 0 or sampling.top_k > 0 or sampling.top_p < 1
        if not self.is_quick or known is None or cuts or len(self.draft_to_target) == len(head):
            return None
        if (log_probs := known[rows + 1]).isnan().any():
            return None
        hidden, drawn = self.batch.final_hidden[rows].to(head.dtype), self.batch.token_ids[rows + 1]
        logit = torch.linalg.vecdot(at_least_float32(hidden), at_least_float32(head[drawn]))
        normaliser = logit / sampling.temperature - log_probs
        return at_least_float32(hidden @ self._own_head.T).div_(sampling.temperature).sub_(normaliser[:, None]).exp_()

    def processed_logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [R, V] after temperature, top-k and top-p, and their logsumexp [R, 1]."""
        head = self.target.head
        logits = at_least_float32(self.batch.final_hidden[rows].to(head.dtype) @ head.T)
        logits = truncate(logits.div_(self.sampling.temperature or 1.0), self.sampling)
        return logits, logits.logsumexp(-1, keepdim=True)

    def of_draft_vocabulary(self, logits: Tensor, normaliser: Tensor) -> Tensor:
        """Return processed probabilities [R, V_draft] from the results of `processed_logits`, which do not change.

        Rows may sum to less than 1: the rest is the mass of tokens the drafter cannot propose, a certain rejection.
        """
        if len(self.draft_to_target) == logits.shape[1]:
            return logits.sub(normaliser).exp_()
        return logits[:, self.draft_to_target].sub_(normaliser).exp_()

    def drawn_draft_ids(self, rows: Tensor) -> Tensor:
        """Return the draft ids [R] of the tokens that follow batch rows [R]; -1 outside the draft vocabulary."""
        tokens = self.batch.token_ids[rows + 1]
        ids = torch.searchsorted(self.draft_to_target, tokens).clamp(max=len(self.draft_to_target) - 1)
        return torch.where(self.draft_to_target[ids] == tokens, ids, -1)


def drafter_loss(
    drafter: Drafter, batch: DraftBatch, target: TargetWeights, sampling: SamplingParams, anchors: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Unroll a drafter to its trained depth and compare each position with the target's processed distribution.

    anchors: share of the starts that is compared; below 1, `generator` draws them. Returns the loss, a differentiable scalar, and the
    mean loss of each draft position [K], detached. Both cover only supervised positions.
    """
    alignment = align(batch, drafter.shape.trained_depth, anchors, generator)
    hidden, head = drafter.drafts(batch, alignment, target)
    teacher = Teacher(batch, target, drafter.draft_to_target, sampling, is_quick=True)
    loss, per_position, accepted = draft_loss(hidden, head, teacher, alignment)
    own = drafter.own_loss(hidden, accepted[0])
    return loss if own is None else loss + own, per_position


@torch.no_grad()
def acceptances(
    drafters: Sequence[Drafter],
    batch: DraftBatch,
    target: TargetWeights,
    sampling: SamplingParams,
    served: int | None = None,
) -> list[StartAcceptance]:
    """Return the acceptance of each drafter at every start; the target's distribution is computed only once.

    Drafters may differ in weights and draft vocabulary, but not in trained depth. served: the draft length of the engines, which
    matters where drafts follow from it; None is the trained depth.
    """
    shape = drafters[0].shape
    depth = served if served and any(drafter.drafts_follow_length for drafter in drafters) else shape.trained_depth
    alignment = align(batch, depth)
    heads = [
        (*d.drafts(batch, alignment, target), Teacher(batch, target, d.draft_to_target, sampling)) for d in drafters
    ]
    tables = [_nothing_accepted(head, alignment) for _, head, _ in heads]
    for index, k, starts, _, result in _comparisons(heads, alignment, with_gradient=False):
        tables[index][:, k, starts] = result.accepted
    rows = alignment.start_rows
    beyond = beyond_stop(batch, rows, depth, shape.sizes.eos_token_ids)
    of_start = generated_before(batch, rows)
    filled = (table.masked_fill(beyond, 0.0) for table in tables)
    return [StartAcceptance(probability, drawn, *of_start) for probability, drawn in filled]


def _nothing_accepted(head: Tensor, alignment: Alignment) -> Tensor:
    """Return the two acceptance tables [2, K, S] before any comparison: all NaN."""
    return at_least_float32(head.new_full((2, *alignment.supervised.shape), torch.nan))


def _comparisons(
    heads: Sequence[tuple[Sequence[Tensor], Tensor, Teacher]], alignment: Alignment, with_gradient: bool
) -> Iterator[tuple[int, int, Tensor, Tensor, Comparison]]:
    """Compare drafters with the target, a chunk of ascending target rows at a time.

    heads: for each drafter, the states its head reads at each draft position, the head, and its teacher. Yields the
    drafter's index, the draft position, its starts [R] in this chunk, the states [R, H] there, and the comparison. Everything
    but products with a head is in float32 or wider, also under autocast.
    """
    heads = [(hidden, in_product_dtype(head), teacher) for hidden, head, teacher in heads]
    supervised = [(row.nonzero()[:, 0], alignment.target_rows(k)) for k, row in enumerate(alignment.supervised)]
    all_rows = torch.cat([target_rows for _, target_rows in supervised]).unique()
    for chunk in all_rows.split(CHUNK_TOKENS) if len(all_rows) else ():
        if (quick := heads[0][2].from_log_probs(chunk)) is not None:
            probabilities = [quick]
        else:  # all teachers have the same target
            processed = heads[0][2].processed_logits(chunk)
            probabilities = [teacher.of_draft_vocabulary(*processed) for *_, teacher in heads]
        bounds = torch.stack([chunk[0], chunk[-1] + 1])
        for k, (starts_of_k, rows_of_k) in enumerate(supervised):
            begin, end = torch.searchsorted(rows_of_k, bounds).tolist()
            if begin == end:
                continue
            starts, rows = starts_of_k[begin:end], rows_of_k[begin:end]
            for index, (hidden, head, teacher) in enumerate(heads):
                states = hidden[k][starts].to(head.dtype)
                logits = at_least_float32(states @ head.T)
                p, drawn = probabilities[index][torch.searchsorted(chunk, rows)], teacher.drawn_draft_ids(rows)
                with torch.autocast(logits.device.type, enabled=False):
                    result = compare(p, logits, drawn, teacher.sampling, with_gradient)
                yield index, k, starts, states, result


def truncate(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return logits [R, V] with -inf outside the top-k and then the top-p set, in vLLM's order and with its ties.

    The logits have been divided by the temperature; at temperature 0 only the likeliest token is left.
    Formula: vLLM v1/sample/ops/topk_topp_sampler.py. top_k = 0 and top_p = 1 switch them off.
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    if sampling.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter_(1, logits.argmax(-1, keepdim=True), 0.0)
    if 0 < top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[:, -1] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits


def draft_loss(
    hidden: Sequence[Tensor], draft_head: Tensor, teacher: Teacher, alignment: Alignment
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the objective over all supervised starts and draft positions.

    hidden: K tensors [S, H], the states that draft_head [V_draft, H] reads for each start. Both distributions are at the
    rollout temperature, which vLLM's drafter applies too (at temperature 0, the drafter's logits are used unscaled).
    The loss of start s at position k has the weight w(k, s) divided by the number of supervised starts of k, and the
    weights are normalised to sum to 1. w is the probability prod_{j<k} alpha_j(s) that the position is reached, through
    which no gradient flows (`reach_weights`).

    Returns the loss, differentiable in `hidden` and `draft_head`; the mean loss over the supervised starts of each
    position [K]; and the two tables of `StartAcceptance` [2, K, S], NaN where not supervised.
    """
    return _DraftLoss.apply(teacher, alignment, torch.is_grad_enabled(), draft_head, *hidden)


def reach_weights(before: Tensor) -> Tensor:
    """Return the weight [S'] of some starts at a position: the probability that verification gets from the start to it.

    before [k, S']: acceptance of the positions before it, NaN where one is not supervised because it predicts a prompt token or
    its target row has no features; such a position counts as accepted. No verification step begins at starts within the prompt,
    but leaving these out did not make better drafters: docs/guide/drafters.md, benchmarks/start_weights.py.
    """
    return before.nan_to_num(1.0).prod(0)


class _DraftLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, so that logits need neither be kept nor computed twice."""

    @staticmethod
    def forward(ctx, teacher, alignment, with_gradients, draft_head, *hidden):
        num_starts = alignment.supervised.sum(1).tolist()
        accepted = _nothing_accepted(draft_head, alignment)
        loss, (per_position, weights) = accepted.new_zeros(()), accepted.new_zeros(2, len(hidden))
        of_hidden = [torch.zeros_like(tensor) for tensor in hidden] if with_gradients else []
        # A head that is the target's own is not trained; its gradient would be as large as the head.
        of_head = torch.zeros_like(draft_head) if with_gradients and ctx.needs_input_grad[3] else None

        head = in_product_dtype(draft_head)
        compared = _comparisons([(hidden, head, teacher)], alignment, with_gradients)
        for _, k, starts, states, result in compared:
            accepted[:, k, starts] = result.accepted
            # Target rows ascend, so the acceptance of a start's earlier positions is already known.
            weight = reach_weights(accepted[0, :k, starts]) / num_starts[k]
            weights[k] += weight.sum()
            loss += torch.dot(weight, result.loss)  # which autocast leaves alone
            per_position[k] += result.loss.sum() / num_starts[k]
            if result.gradient is not None:
                gradient = result.gradient.mul_(weight[:, None]).to(states.dtype)
                if of_head is not None and states.dtype == of_head.dtype:
                    of_head.addmm_(gradient.T, states)
                elif of_head is not None:
                    of_head += gradient.T @ states
                of_hidden[k][starts] = (gradient @ head).to(of_hidden[k].dtype)

        total = weights.sum().clamp(min=torch.finfo(accepted.dtype).tiny)
        ctx.save_for_backward(*(None if g is None else g.div_(total) for g in (of_head, *of_hidden)))
        ctx.mark_non_differentiable(per_position, accepted)
        return loss / total, per_position, accepted

    @staticmethod
    def backward(ctx, loss_gradient, *_):
        return (None,) * 3 + tuple(None if g is None else g * loss_gradient for g in ctx.saved_tensors)


def in_product_dtype(matrix: Tensor) -> Tensor:
    """Return a matrix in the number format of its products: under autocast that of autocast, and otherwise its own."""
    device = matrix.device.type
    return matrix.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else matrix


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
