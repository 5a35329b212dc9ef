"""EAGLE-3 and block drafters after equal processor time on the same text of a real engine.

    cotrain init configs/quickstart.toml name=trial init.tokens=100000 init.epochs=1 rollout.max_new_tokens=96 \\
        task.instruction="Explain each step, then give the answer."
    python -m benchmarks.block_trial runs/trial [--seeds 0 1] [--cpu-seconds 240] [--anchors 0.25]

Each arm trains until its processor time is spent, with the same order of batches for a seed, and prints a Markdown row: updates,
and the acceptance length expected on held-out rollouts at temperature 1, for drawn drafts and for the likeliest.
"""

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.stored_text import StoredText, read_text
from cotrain.optimizer import MAX_GRAD_NORM
from cotrain.trainer.buffer import batches_of
from cotrain.trainer.target import read_target_weights
from cotrain.transport.features import FeatureRecord
from drafters.acceptance import rollout_acceptance
from drafters.alignment import DraftBatch
from drafters.base import Drafter, SamplingParams, TargetSpec, TargetWeights
from drafters.build import build_drafter
from drafters.config import DFlashConfig, DrafterModelConfig, Eagle3Config
from drafters.losses import acceptances, drafter_loss

VOCABULARY, BATCH_TOKENS, LEARNING_RATE, WARMUP = 4096, 2048, 1e-3, 0.05
DRAWN, LIKELIEST = (SamplingParams(1.0, 1.0, 0, method) for method in ("probabilistic", "greedy"))
ARMS: dict[str, DrafterModelConfig] = {
    "EAGLE-3, depth 3": Eagle3Config(type="eagle3", draft_vocab_size=VOCABULARY, trained_depth=3),
    "EAGLE-3, depth 5": Eagle3Config(type="eagle3", draft_vocab_size=VOCABULARY, trained_depth=5),
    **{
        f"DFlash, {n} layer{'s' * (n > 1)}": DFlashConfig(
            type="dflash", draft_vocab_size=VOCABULARY, num_layers=n, trained_depth=5
        )
        for n in (1, 2)
    },
}
LENGTHS = (1, 2, 3, 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", type=Path, help="run folder of a `cotrain init`, which may have been stopped once its text was there"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default 0 1")
    parser.add_argument("--cpu-seconds", type=float, default=240, help="of training in each arm (default %(default)s)")
    parser.add_argument(
        "--anchors", type=float, default=0.25, help="share of the starts of a step (default %(default)s)"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text(args.run)
    spec = TargetSpec.from_pretrained(text.model)
    target = read_target_weights(text.model, 0, spec, "cpu")
    target = TargetWeights(target.embedding.float(), target.head.float(), 0)
    tokens = int(text.response_tokens(spec.vocab_size).sum())
    print(f"{len(text.training)} rollouts, {tokens} response tokens; {len(text.held_out)} rollouts held out")
    print(f"| drafter | seed | updates | {' | '.join(f'drawn, k = {k}' for k in LENGTHS)} | likeliest, k = 3 |")
    print("|---|--:|--:|" + "--:|" * (len(LENGTHS) + 1))
    for seed, name in itertools.product(args.seeds, args.arms):
        drafter = build_drafter(ARMS[name], spec, seed)
        updates = train(drafter, text, target, seed, args.cpu_seconds, args.anchors)
        lengths = [length(drafter, text.held_out, target, DRAWN, k) for k in LENGTHS]
        cells = [
            f"{value:.3f}" if value else ""
            for value in (*lengths, length(drafter, text.held_out, target, LIKELIEST, 3))
        ]
        print(f"| {name} | {seed} | {updates} | {' | '.join(cells)} |", flush=True)
    return 0


def train(
    drafter: Drafter, text: StoredText, target: TargetWeights, seed: int, cpu_seconds: float, anchors: float
) -> int:
    """Train until the processor time is spent, over which the learning rate follows a cosine. Returns the updates."""
    generator, shuffled, updates = torch.Generator().manual_seed(seed), random.Random(seed), 0
    started, spent = time.process_time(), 0.0
    drafter.choose_vocabulary(text.response_tokens(len(target.head)), target)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    rate = LambdaLR(optimizer, lambda _: _rate(spent / cpu_seconds))
    while True:
        order = list(text.training)
        shuffled.shuffle(order)
        for batch, _ in batches_of(order, BATCH_TOKENS):
            if updates == 0:
                drafter.start_training(batch, is_new=True)
            optimizer.zero_grad()
            drafter_loss(drafter, batch, target, DRAWN, anchors, generator)[0].backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            updates, spent = updates + 1, time.process_time() - started
            if spent > cpu_seconds:
                return updates
            rate.step()


def _rate(share: float) -> float:
    return min(max(share, 0.01) / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def length(
    drafter: Drafter, records: Sequence[FeatureRecord], target: TargetWeights, sampling: SamplingParams, k: int
) -> float | None:
    """The acceptance length that an engine would count; None if the drafter was not trained for k draft tokens."""
    if k > drafter.shape.trained_depth:
        return None
    batches: list[DraftBatch] = [rows for rows, _ in batches_of(records, BATCH_TOKENS)]
    parts = [acceptances([drafter], batch, target, sampling)[0] for batch in batches]
    return 1.0 + sum(rollout_acceptance(parts, k).rates())


if __name__ == "__main__":
    sys.exit(main())
