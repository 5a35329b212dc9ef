"""What weight verification positions of starts that are never served should have in the drafter's objective.

    python -m benchmarks.own_text runs/starts configs/quickstart.toml steps=23
    python -m benchmarks.start_weights runs/starts [--seeds 0 1] [--epochs 3]

A verification step begins with a generated token. Starts before it can be trained on too. Each arm trains a drafter on
the text of the run, with the same first weights and the same order of batches for a seed, and prints its expected acceptance
length on the held-out rollouts as a Markdown row.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import drafters.losses
from benchmarks.stored_text import StoredText, read_text
from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.trainer.buffer import batches_of
from cotrain.trainer.trainer import read_target_weights
from drafters.acceptance import rollout_acceptance
from drafters.alignment import Alignment, DraftBatch, generated_before
from drafters.base import Drafter, SamplingParams, TargetSpec, TargetWeights
from drafters.build import build_drafter

SHORT_ANSWER = 10

CERTAIN, LIKELY, LEFT_OUT = "certainly reached", "reached with probability 0.8", "left out"
ARMS = (CERTAIN, LIKELY, LEFT_OUT)
"""What a position that predicts a token of the prompt counts as: accepted for certain, as in drafters/losses.py; accepted with
probability 0.8; or its start is not trained on at all."""


@contextmanager
def arm_of(name: str) -> Iterator[None]:
    """Train as the arm does."""
    align, reach_weights = drafters.losses.align, drafters.losses.reach_weights

    def without_unserved(batch: DraftBatch, depth: int) -> Alignment:
        alignment = align(batch, depth)
        served = generated_before(batch, alignment.start_rows) >= 0
        return replace(alignment, supervised=alignment.supervised & served)

    if name == LIKELY:
        drafters.losses.reach_weights = lambda before: before.nan_to_num(0.8).prod(0)
    if name == LEFT_OUT:
        drafters.losses.align = without_unserved
    try:
        yield
    finally:
        drafters.losses.align, drafters.losses.reach_weights = align, reach_weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a folder of own_text.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default 0 1")
    parser.add_argument("--epochs", type=int, default=3, help="default %(default)s")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    args = parser.parse_args()
    print(
        "| starts that are never served | seed | all | short answers | others | accepted at position 1, 2, 3 | their weight |"
    )
    print("|---|---|---|---|---|---|---|")
    text = read_text(args.run)
    for seed in args.seeds:
        for arm in args.arms:
            print(row(text, arm, seed, args.epochs), flush=True)
    return 0


def row(text: StoredText, arm: str, seed: int, epochs: int) -> str:
    """Train one arm and judge it."""
    config, model = text.config, text.model
    assert config.drafter is not None
    spec = TargetSpec.from_pretrained(model)
    target = read_target_weights(model, 0, spec, "cpu")
    rollout = config.rollout
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
    training, holdout = text.training, text.held_out

    drafter = build_drafter(config.drafter.model, spec, seed)
    drafter.choose_vocabulary(text.response_tokens(spec.vocab_size), target)
    optimizer, _ = build_optimizer(drafter.parameters(), config.drafter.optimizer, total_steps=1)
    shuffled = random.Random(seed)
    with arm_of(arm):
        for _ in range(epochs):
            order = list(training)
            shuffled.shuffle(order)
            for batch, _ in batches_of(order, config.drafter.batch_tokens):
                optimizer.zero_grad()
                drafters.losses.drafter_loss(drafter, batch, target, sampling)[0].backward()
                torch.nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRAD_NORM)
                optimizer.step()

    batches = [rows for rows, _ in batches_of(holdout, config.drafter.batch_tokens)]
    parts = [drafters.losses.acceptances([drafter], batch, target, sampling)[0] for batch in batches]
    scored = rollout_acceptance(parts, rollout.num_speculative_tokens)
    short = np.array([r.num_tokens - r.prompt_length <= SHORT_ANSWER for r in holdout])
    lengths = [length_of(scored.steps, scored.accepted, rows) for rows in (short | ~short, short, ~short)]
    rates = " ".join(f"{rate:.2f}" for rate in (scored.accepted.sum(0) / scored.steps.sum()).tolist())
    with arm_of(arm):
        share = unserved_share(drafter, batches, target, sampling)
    cells = [arm, str(seed), *(f"{length:.3f}" for length in lengths), rates, " ".join(f"{part:.0%}" for part in share)]
    return f"| {' | '.join(cells)} |"


@torch.no_grad()
def unserved_share(
    drafter: Drafter, batches: Sequence[DraftBatch], target: TargetWeights, sampling: SamplingParams
) -> list[float]:
    """Share of each position's weight that falls on starts where no verification step begins."""
    depth = drafter.shape.trained_depth
    of_unserved, of_all = torch.zeros(depth), torch.zeros(depth)
    for batch in batches:
        alignment = drafters.losses.align(batch, depth)
        teacher = drafters.losses.Teacher(batch, target, drafter.draft_to_target, sampling)
        drafts = drafter.drafts(batch, alignment, target)
        *_, accepted = drafters.losses.draft_loss(*drafts, teacher, alignment)
        unserved = generated_before(batch, alignment.start_rows) < 0
        for k in range(depth):
            weight = drafters.losses.reach_weights(accepted[0, :k]) * alignment.supervised[k]
            of_unserved[k] += weight[unserved].sum()
            of_all[k] += weight.sum()
    return (of_unserved / of_all).tolist()


def length_of(steps: np.ndarray, accepted: np.ndarray, rows: np.ndarray) -> float:
    return 1 + float(accepted[rows].sum() / steps[rows].sum())


if __name__ == "__main__":
    sys.exit(main())
