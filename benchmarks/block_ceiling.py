"""The acceptance length of a perfect drafter whose draft tokens do not know each other, as those of a block do not.

    python -m benchmarks.block_ceiling runs/trial [--contexts 40] [--paths 64]

runs/trial is that of benchmarks.block_trial. At a random place of a held-out rollout the policy's own token is the one that an engine
has sampled, and behind it `paths` continuations are sampled at temperature 1. Proposal q of position j is accepted with the mean over
the paths of sum_v min(p(v), q(v)), weighted by the probability that verification gets there. The best q is fitted on half of the paths
and judged on the other half, which is a little too low, and fitted and judged on all, a little too high; both are printed. A drafter
that knows the tokens before its own has a ceiling of 1 + k.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.stored_text import read_rollouts

LENGTHS = (1, 3, 5, 7)
LIKELY = 1e-4
"""Tokens less likely than this on every path are left out of a proposal."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a folder of own_text.py")
    parser.add_argument("--contexts", type=int, default=40, help="default %(default)s")
    parser.add_argument("--paths", type=int, default=64, help="continuations of each (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder, _, held_out = read_rollouts(args.run)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drawn, generator = random.Random(0), torch.Generator().manual_seed(0)
    found = []
    for _ in range(args.contexts):
        sequence, prompt_length = drawn.choice(held_out)
        place = drawn.randrange(prompt_length + 1, len(sequence) + 1)
        laws, tokens = continuations(model, torch.tensor(sequence[:place]), args.paths, generator)
        half = torch.arange(args.paths) < args.paths // 2
        every = torch.ones(args.paths, dtype=torch.bool)
        splits = [(half, ~half), (every, every)]
        found.append(
            [[acceptance_length(laws[:k], tokens, *s, d) for s in splits] for d in (True, False) for k in LENGTHS]
        )
    lengths = torch.tensor(found)  # [contexts, drawn or likeliest x k, split]
    mean, error = lengths.mean(0), lengths[..., 1].std(0) / args.contexts**0.5
    print(f"{args.contexts} contexts, {args.paths} paths each; ± a standard error over contexts")
    print(f"| proposals | {' | '.join(f'k = {k}' for k in LENGTHS)} |\n|---|" + "--:|" * len(LENGTHS))
    for start, name in ((0, "drawn"), (len(LENGTHS), "likeliest")):
        cells = [f"{mean[i, 0]:.2f} to {mean[i, 1]:.2f} ± {error[i]:.2f}" for i in range(start, start + len(LENGTHS))]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


@torch.inference_mode()
def continuations(model: Any, context: Tensor, paths: int, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """Sample continuations of a context [T]. Returns the laws [paths, V] of each position and the tokens [paths, positions]."""
    cache = DynamicCache()
    if len(context) > 1:
        model(context[None, :-1], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(paths)
    step, laws, tokens = context[-1].expand(paths, 1), list[Tensor](), list[Tensor]()
    for _ in range(max(LENGTHS)):
        laws.append(model(step, past_key_values=cache).logits[:, -1].double().softmax(-1))
        step = torch.multinomial(laws[-1].float(), 1, generator=generator)
        tokens.append(step[:, 0])
    return laws, torch.stack(tokens, 1)


def acceptance_length(laws: list[Tensor], tokens: Tensor, fitted: Tensor, judged: Tensor, drawn: bool) -> float:
    """Return the length of the best proposals, fitted and judged on these paths [paths]."""
    reached, total = torch.ones(len(tokens), dtype=torch.float64), 1.0
    for position, law in enumerate(laws):
        if not reached[fitted].sum() or not reached[judged].sum():
            break
        own = tokens[:, position, None]
        if drawn:
            q = best_proposal(law[fitted], reached[fitted])
            accepted = torch.minimum(law, q).sum(-1)
            kept = (q[own] / law.gather(1, own)).clamp(max=1)[:, 0]  # probability that the path's own token is accepted
        else:
            token = (reached[fitted, None] * law[fitted]).sum(0).argmax()
            accepted, kept = law[:, token], (own[:, 0] == token).double()
        total += float((reached * accepted)[judged].mean())
        reached = reached * kept
    return total


def best_proposal(laws: Tensor, weights: Tensor) -> Tensor:
    """Return the distribution q [V] with the largest weighted mean of sum min(p, q) over laws p [N, V].

    At the best q the weight of the laws above q(v) is the same for all v, so q(v) is a quantile; bisection finds the level at which
    the quantiles add up to one.
    """
    likely = laws.max(0).values > LIKELY
    values, order = laws[:, likely].sort(0)
    above = 1 - (weights / weights.sum())[order].cumsum(0)  # weight of the laws that are larger
    low, high = 0.0, 1.0
    for _ in range(30):
        level = (low + high) / 2
        at_level = (above > level).sum(0, keepdim=True).clamp(max=len(values) - 1)
        q = values.gather(0, at_level)[0]
        low, high = (level, high) if q.sum() > 1 else (low, level)
    proposal = torch.zeros_like(laws[0])
    proposal[likely] = q
    return proposal / proposal.sum().clamp(min=1.0)


if __name__ == "__main__":
    sys.exit(main())
