"""What block verification would add to the acceptance length of trained drafters, without implementing it.

    python -m benchmarks.block_trial runs/trial --seeds 0 --cpu-seconds 150 --save runs/trial-drafters
    python -m benchmarks.block_verification runs/trial runs/trial-drafters/*-0

Verification token by token accepts j drafts whose tokens are the rollout's x with probability prod_{i<=j} min(1, r_i), with
r_i = q_i(x_i) / p_i(x_i). Block verification (Sun et al., arXiv 2403.10444) accepts j drafts x with probability P_j(x), where
P_0 = 1 and P_j = min(1, P_{j-1} / r_j); since the draft is x with probability prod r_i times that of the rollout, the
probability given the rollout is w_j = P_j prod_{i<=j} r_i = min(w_{j-1}, prod_{i<=j} r_i). So both follow from the same held-out
rollouts, and the difference is exact up to the sampling of the rollouts. Rows: acceptance length at k, its error over
rollouts by the jackknife, and their ratio.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import drafters.losses
from benchmarks.block_trial import DRAWN, LENGTHS, compared
from benchmarks.stored_text import read_text
from cotrain.trainer.trainer import read_target_weights
from drafters.acceptance import StartAcceptance
from drafters.base import SamplingParams, TargetSpec, TargetWeights
from drafters.build import load_drafter
from drafters.losses import Comparison


def whole_ratio(p: Tensor, logits: Tensor, drawn: Tensor, sampling: SamplingParams, with_gradient: bool) -> Comparison:
    """Compare like `drafters.losses.compare`, but return q(x)/p(x) of the rollout's token where it would be cut at 1."""
    q, token = (logits / sampling.temperature).softmax(-1), drawn.clamp(min=0)[:, None]
    ratio = q.gather(1, token) / p.gather(1, token).clamp(min=torch.finfo(p.dtype).tiny)
    alpha = torch.minimum(p, q).sum(-1)
    return Comparison(alpha, torch.stack([alpha, ratio.squeeze(1) * (drawn >= 0)]), None)


def by_rollout(parts: Sequence[StartAcceptance], k: int) -> list[Tensor]:
    """Return the ratios [k, L] of each rollout at its L starts, in order, up to the first one that has fewer than k known ratios."""
    rollouts = []
    for part in parts:
        for index in part.rollout.unique().tolist():
            own = (part.rollout == index) & (part.offset >= 0)
            ratios = part.drawn[:k, own][:, part.offset[own].argsort()]
            unknown = (~ratios.isfinite().all(0)).nonzero()[:, 0].tolist()
            if (whole := ratios[:, : unknown[0]] if unknown else ratios).shape[1]:
                rollouts.append(whole.double())
    return rollouts


def steps_and_tokens(accepted: Tensor) -> tuple[float, float]:
    """Return how many verification steps a rollout takes and how many tokens these emit.

    accepted [k, L]: probability that a step that begins at a start accepts at least so many drafts.
    """
    most, length = accepted.shape
    at_least = torch.cat([torch.ones(1, length), accepted, torch.zeros(1, length)]).double()
    exactly, begun = at_least[:-1] - at_least[1:], torch.zeros(length + most + 1, dtype=torch.float64)
    begun[0] = 1.0
    for start in range(length):
        begun[start + 1 : start + most + 2] += begun[start] * exactly[:, start]
    begun = begun[:length]
    return begun.sum().item(), (begun * (1 + accepted.sum(0))).sum().item()


def token_by_token(ratios: Tensor) -> Tensor:
    return ratios.clamp(max=1).cumprod(0)


def in_blocks(ratios: Tensor) -> Tensor:
    return ratios.cumprod(0).clamp(max=1).cummin(0).values


def estimate(rollouts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return acceptance lengths token by token, in blocks, and the ratio of the second to the first; and their errors."""
    counts = torch.tensor([[steps_and_tokens(rule(r)) for rule in (token_by_token, in_blocks)] for r in rollouts])

    def lengths(sums: Tensor) -> Tensor:
        steps, tokens = sums.unbind(-1)
        each = tokens / steps
        return torch.cat([each, each[..., 1:] / each[..., :1]], -1)

    without = lengths(counts.sum(0) - counts)
    error = ((without - without.mean(0)).square().sum(0) * (len(counts) - 1) / len(counts)).sqrt()
    return lengths(counts.sum(0)), error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a folder of own_text.py")
    parser.add_argument("drafters", type=Path, nargs="+", help="their folders")
    args = parser.parse_args()
    torch.set_num_threads(1)
    drafters.losses.compare = whole_ratio
    text = read_text(args.run)
    spec = TargetSpec.from_pretrained(text.model)
    target = read_target_weights(text.model, 0, spec, "cpu")
    target = TargetWeights(target.embedding.float(), target.head.float(), 0)
    print("| drafter | k | token by token | in blocks | gain |\n|---|--:|--:|--:|--:|")
    for folder in args.drafters:
        drafter = load_drafter(folder, spec)
        parts = compared(drafter, text.held_out, target, DRAWN)
        for k in LENGTHS[1:]:
            if k <= drafter.shape.trained_depth:
                values, errors = estimate(by_rollout(parts, k))
                cells = " | ".join(f"{v:.3f} ± {e:.3f}" for v, e in zip(values.tolist(), errors.tolist(), strict=True))
                print(f"| {folder.name} | {k} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
