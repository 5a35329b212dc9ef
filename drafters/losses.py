"""The training objective over all draft positions, in chunks of target rows.

The target's distribution over its whole vocabulary costs more than everything else, and its row r serves draft
position 0 of start r-1, position 1 of start r-2 and so on. So the outer loop runs over chunks of target rows and the
inner one over draft positions, gradients are taken on the spot, and nothing of size rows x vocabulary outlives a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.acceptance import StartAcceptance
from drafters.alignment import Alignment, DraftBatch, align, beyond_stop, generated_before
from drafters.base import Drafter, DraftLoss, Drafts, Sampler, TargetWeights
from drafters.config import ObjectiveConfig
from drafters.objectives import compare

CHUNK_TOKENS = 512
"""Rows whose logits are in memory at once. It bounds peak memory and never changes the result."""
DEPTH_DECAY = 0.8
"""Weight of a draft position against the one before it, with depth_weights = "decay"."""


@dataclass(frozen=True)
class Teacher:
    """The target's final hidden states, its head, and what of its distribution a drafter can propose."""

    token_ids: Tensor  # [N]
    final_hidden: Tensor  # [N, H]
    head: Tensor  # [V, H]
    draft_to_target: Tensor  # [V_draft] ascending target ids
    sampler: Sampler

    def probabilities(self, rows: Tensor) -> Tensor:
        """Processed probabilities [R, V_draft] of the draft vocabulary at batch rows [R].

        Rows sum to less than 1: the rest is the mass of tokens the drafter cannot propose, hence a certain rejection.
        """
        return self.of_draft_vocabulary(*self.processed_logits(rows))

    def processed_logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the whole vocabulary after temperature, top-k and top-p, and their logsumexp [R, 1]."""
        logits = at_least_float32(self.final_hidden[rows].to(self.head.dtype) @ self.head.T)
        if self.sampler.temperature == 0:
            likeliest = logits.argmax(-1, keepdim=True)
            return torch.full_like(logits, -torch.inf).scatter_(1, likeliest, 0.0), logits.new_zeros(len(rows), 1)
        logits = truncate(logits.div_(self.sampler.temperature), self.sampler.top_k, self.sampler.top_p)
        return logits, logits.logsumexp(-1, keepdim=True)

    def of_draft_vocabulary(self, logits: Tensor, normaliser: Tensor) -> Tensor:
        """`probabilities` from `processed_logits`, which stay as they are."""
        if len(self.draft_to_target) == logits.shape[1]:
            return logits.sub(normaliser).exp_()
        return logits[:, self.draft_to_target].sub_(normaliser).exp_()

    def drawn_draft_ids(self, rows: Tensor) -> Tensor:
        """Draft ids [R] of the tokens that follow batch rows [R]; -1 outside the draft vocabulary."""
        tokens = self.token_ids[rows + 1]
        ids = torch.searchsorted(self.draft_to_target, tokens).clamp(max=len(self.draft_to_target) - 1)
        return torch.where(self.draft_to_target[ids] == tokens, ids, -1)


class Losses(NamedTuple):
    """K draft positions, S starts."""

    loss: Tensor  # scalar
    per_position: Tensor  # [K] mean loss of the supervised starts
    acceptance: Tensor  # [K, S] probability that a draft is accepted; NaN where not supervised
    drawn_accepted: Tensor  # [K, S] probability that the rollout's own next token was an accepted draft; NaN likewise


def drafter_loss(
    drafter: Drafter, batch: DraftBatch, target: TargetWeights, sampler: Sampler, objective: ObjectiveConfig
) -> DraftLoss:
    """What `Drafter.loss` is: unroll, compare, and give the acceptance back by rollout."""
    alignment = align(batch, drafter.trained_depth)
    drafts = drafter.drafts(batch, alignment, target)
    losses = draft_loss(drafts.hidden, drafts.head, _teacher(drafts, batch, target, sampler), alignment, objective)
    (acceptance,) = _of_rollouts([(losses.acceptance, losses.drawn_accepted)], batch, alignment, drafts.eos_token_ids)
    return DraftLoss(losses.loss, losses.per_position, acceptance, int(alignment.supervised[0].sum()))


@torch.no_grad()
def acceptances(
    drafters: Sequence[Drafter], batch: DraftBatch, target: TargetWeights, sampler: Sampler, objective: ObjectiveConfig
) -> list[StartAcceptance]:
    """`drafter_loss(...).acceptance` of each drafter, for which the target's distribution is computed only once.

    Drafters may differ in weights and draft vocabulary. Raises ValueError when they differ in trained depth.
    """
    depths = {drafter.trained_depth for drafter in drafters}
    if len(depths) != 1:
        raise ValueError(f"drafters of different trained depths cannot be compared: {sorted(depths)}")
    alignment = align(batch, depths.pop())
    drafts = [drafter.drafts(batch, alignment, target) for drafter in drafters]
    teachers = [_teacher(own, batch, target, sampler) for own in drafts]
    found = []
    for own in drafts:
        precision = torch.promote_types(own.head.dtype, torch.float32)
        found.append(own.head.new_full((2, *alignment.supervised.shape), torch.nan, dtype=precision))
    for chunk in _chunks(alignment, CHUNK_TOKENS):
        processed = teachers[0].processed_logits(chunk.rows)
        for own, teacher, table in zip(drafts, teachers, found, strict=True):
            p = teacher.of_draft_vocabulary(*processed)
            for k, starts, rows in chunk.positions:
                logits = at_least_float32(own.hidden[k][starts] @ own.head.T)
                p_k = p[torch.searchsorted(chunk.rows, rows)]
                result = compare(p_k, logits, teacher.drawn_draft_ids(rows), sampler, objective, with_gradient=False)
                table[0, k, starts], table[1, k, starts] = result.acceptance, result.drawn_accepted
    return _of_rollouts([(table[0], table[1]) for table in found], batch, alignment, drafts[0].eos_token_ids)


def _teacher(drafts: Drafts, batch: DraftBatch, target: TargetWeights, sampler: Sampler) -> Teacher:
    return Teacher(batch.token_ids, batch.final_hidden, target.head, drafts.draft_to_target, sampler)


def _of_rollouts(
    tables: Sequence[tuple[Tensor, Tensor]], batch: DraftBatch, alignment: Alignment, eos_token_ids: Sequence[int]
) -> list[StartAcceptance]:
    """`Losses.acceptance` and `drawn_accepted` by rollout, 0 behind an end-of-sequence token."""
    stopped = beyond_stop(batch, alignment.start_rows, len(alignment.supervised), eos_token_ids)
    rollout = batch.document_ids[alignment.start_rows]
    offset = generated_before(batch, alignment.start_rows)
    return [
        StartAcceptance(probability.masked_fill(stopped, 0.0), drawn.masked_fill(stopped, 0.0), rollout, offset)
        for probability, drawn in tables
    ]


class _Chunk(NamedTuple):
    """Some target rows, and what is compared with them."""

    rows: Tensor  # [R] ascending
    positions: list[tuple[int, Tensor, Tensor]]  # draft position, its starts, their target rows


def _chunks(alignment: Alignment, chunk_tokens: int) -> Iterator[_Chunk]:
    """All target rows, ascending."""
    depth = len(alignment.supervised)
    supervised = [alignment.supervised[k].nonzero().squeeze(1) for k in range(depth)]
    target_rows = [alignment.target_rows(k) for k in range(depth)]
    all_rows = torch.cat(target_rows).unique()
    for first in range(0, len(all_rows), chunk_tokens):
        rows = all_rows[first : first + chunk_tokens]
        bounds = torch.stack([rows[0], rows[-1] + 1])
        positions = []
        for k in range(depth):
            begin, end = torch.searchsorted(target_rows[k], bounds).tolist()
            if begin != end:
                positions.append((k, supervised[k][begin:end], target_rows[k][begin:end]))
        yield _Chunk(rows, positions)


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


def draft_loss(
    hidden: Sequence[Tensor], draft_head: Tensor, teacher: Teacher, alignment: Alignment, objective: ObjectiveConfig
) -> Losses:
    """The objective over all supervised starts and draft positions.

    hidden: K tensors [S, H], what the drafter's head [V_draft, H] reads for each start. Both distributions are at the
    rollout temperature, which is what vLLM's drafter applies (at temperature 0 the drafter's logits are taken as they
    are). The loss of start s at position k has the weight w(k, s), divided by the number of supervised starts of k and
    normalised to sum 1: DEPTH_DECAY**k, or with depth_weights = "reach" the probability that the position is reached,
    prod_{j<k} alpha_j(s), of which no gradient is taken (`reach_weights`). Only `loss` is differentiable, with respect to
    `hidden` and `draft_head`.
    """
    return Losses(*_DraftLoss.apply(teacher, alignment, objective, torch.is_grad_enabled(), draft_head, *hidden))


def reach_weights(before: Tensor) -> Tensor:
    """Weight [S'] of some starts at a position: the probability that verification reaches it from there.

    before [k, S']: acceptance of the positions before it. It is NaN where such a position predicts a token of the prompt,
    which only happens at starts where no verification step begins; these positions count as accepted. Starts of this
    kind are data beyond what is served, and leaving them out made no better drafter: docs/drafters.md,
    benchmarks/start_weights.py.
    """
    return before.nan_to_num(1.0).prod(0)


class _DraftLoss(torch.autograd.Function):
    """Takes the gradients in the forward pass, so that logits need neither be kept nor computed twice."""

    @staticmethod
    def forward(ctx, teacher, alignment, objective, with_gradients, draft_head, *hidden):
        depth = len(hidden)
        num_starts = alignment.supervised.sum(1).tolist()
        precision = torch.promote_types(draft_head.dtype, torch.float32)
        per_position = draft_head.new_zeros(depth, dtype=precision)
        acceptance = draft_head.new_full(alignment.supervised.shape, torch.nan, dtype=precision)
        drawn_accepted = acceptance.clone()
        weights = draft_head.new_zeros(depth, dtype=precision)
        loss = draft_head.new_zeros((), dtype=precision)
        of_hidden = [torch.zeros_like(tensor) for tensor in hidden] if with_gradients else []
        # A head that is the target's own is not trained; its gradient would be as large as the head.
        of_head = torch.zeros_like(draft_head) if with_gradients and ctx.needs_input_grad[4] else None

        for chunk in _chunks(alignment, CHUNK_TOKENS):
            p = teacher.probabilities(chunk.rows)
            for k, starts, rows in chunk.positions:
                p_k = p[torch.searchsorted(chunk.rows, rows)]
                states = hidden[k][starts]
                logits = at_least_float32(states @ draft_head.T)
                drawn = teacher.drawn_draft_ids(rows)
                result = compare(p_k, logits, drawn, teacher.sampler, objective, with_gradients)
                acceptance[k, starts] = result.acceptance
                drawn_accepted[k, starts] = result.drawn_accepted
                # Rows ascend, so that the acceptance of a start's earlier positions is there already.
                reach = reach_weights(acceptance[:k, starts]) if objective.depth_weights == "reach" else DEPTH_DECAY**k
                weight = result.loss.new_ones(len(starts)) * reach / num_starts[k]
                weights[k] += weight.sum()
                loss += weight @ result.loss
                per_position[k] += result.loss.sum() / num_starts[k]
                if result.gradient is not None:
                    gradient = result.gradient.mul_(weight[:, None]).to(draft_head.dtype)
                    if of_head is not None:
                        of_head.addmm_(gradient.T, states)
                    of_hidden[k][starts] = gradient @ draft_head

        total = weights.sum().clamp(min=torch.finfo(precision).tiny)
        ctx.save_for_backward(*(None if g is None else g.div_(total) for g in (of_head, *of_hidden)))
        ctx.mark_non_differentiable(per_position, acceptance, drawn_accepted)
        return loss / total, per_position, acceptance, drawn_accepted

    @staticmethod
    def backward(ctx, loss_gradient, *_):
        return (None,) * 4 + tuple(None if g is None else g * loss_gradient for g in ctx.saved_tensors)


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32, or as they are when they are wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
