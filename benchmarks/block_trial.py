"""EAGLE-3 and block drafters after equal processor time on the same text of a real engine.

    python -m benchmarks.own_text runs/trial configs/quickstart.toml steps=10 rollout.max_new_tokens=96 \\
        rollout.prompts_per_step=32 \\
        task.instruction="Explain each step, then give the answer."
    python -m benchmarks.block_trial runs/trial [--seeds 0 1] [--cpu-seconds 240 | --updates 100] [--anchors 0.25]

Each arm trains until its processor time or its updates are spent, with the same order of batches for a seed, and prints a Markdown
row: objective, updates, processor seconds, and the acceptance length expected on held-out rollouts at temperature 1, for drawn drafts
and for the likeliest. With --results, arms of several processes are put together: rows are appended to that file, and the last table
has the means over all its seeds, each with its standard error.

Objectives: `acceptance` is cotrain's own. `token` is the cross-entropy with the rollout's token, as in the DFlash paper and SpecForge,
and `argmax` that with the target's likeliest token, as in vllm-project/speculators; both weigh position j by exp(-j / 4).
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.stored_text import StoredText, read_text
from cotrain.optimizer import MAX_GRAD_NORM
from cotrain.trainer.buffer import batches_of
from cotrain.trainer.trainer import read_target_weights
from cotrain.transport.features import FeatureRecord
from drafters import alignment
from drafters.acceptance import StartAcceptance, rollout_acceptance
from drafters.alignment import ANCHOR_RUN, DraftBatch, align
from drafters.base import Drafter, SamplingParams, TargetSpec, TargetWeights
from drafters.block.model import DFlashDrafter
from drafters.build import build_drafter
from drafters.config import DFlashConfig, DrafterModelConfig, Eagle3Config
from drafters.losses import Teacher, acceptances, drafter_loss

BATCH_TOKENS, LEARNING_RATE, WARMUP, DECAY = 2048, 1e-3, 0.05, 4.0
DRAWN, LIKELIEST = (SamplingParams(1.0, 1.0, 0, method) for method in ("probabilistic", "greedy"))
LENGTHS = (1, 3, 5, 7)
OBJECTIVES = ("acceptance", "token", "argmax")


def arms(vocabulary: int, depth: int) -> dict[str, DrafterModelConfig]:
    """The drafters of the study, with this draft vocabulary; block drafters propose `depth` tokens."""
    own: dict[str, Any] = {"draft_vocab_size": vocabulary}
    return {
        **{f"EAGLE-3, depth {d}": Eagle3Config(type="eagle3", trained_depth=d, **own) for d in sorted({3, depth})},
        **{f"DFlash, {n}": DFlashConfig(type="dflash", num_layers=n, trained_depth=depth, **own) for n in (1, 2, 3)},
        **{f"DSpark, {n}": DFlashConfig(type="dspark", num_layers=n, trained_depth=depth, **own) for n in (1, 2)},
    }


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a folder of own_text.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default 0 1")
    parser.add_argument("--cpu-seconds", type=float, default=240, help="of training in each arm (default %(default)s)")
    parser.add_argument(
        "--anchors", type=float, default=0.25, help="share of the starts of a step (default %(default)s)"
    )
    parser.add_argument(
        "--anchor-run", type=int, default=alignment.ANCHOR_RUN, help="starts drawn together (default %(default)s)"
    )
    parser.add_argument("--all-logits", action="store_true", help="do without the log-probabilities of the rollouts")
    parser.add_argument("--updates", type=int, help="of each arm, in place of a processor time")
    parser.add_argument(
        "--objectives", nargs="+", choices=OBJECTIVES, default=["acceptance"], help="default acceptance"
    )
    parser.add_argument("--vocabulary", type=int, default=4096, help="of the drafts (default %(default)s)")
    parser.add_argument("--depth", type=int, default=7, help="length of a block (default %(default)s)")
    names = [*arms(4096, 7)]
    parser.add_argument("--arms", nargs="+", metavar="ARM", help=f"{', '.join(names)} (default all)")
    parser.add_argument("--random-start", action="store_true", help="block drafters begin without their first weights")
    parser.add_argument("--results", type=Path, help="JSON lines, for the table of means")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="of the trained drafters, for `cotrain bench`")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    torch.set_num_threads(1)
    alignment.ANCHOR_RUN = args.anchor_run
    if args.random_start:
        DFlashDrafter._start_near = lambda self, batch, target: None  # type: ignore[method-assign]
    text = read_text(args.run)
    if args.all_logits:
        text = replace(text, training=[replace(record, log_probs=None) for record in text.training])
    spec = TargetSpec.from_pretrained(text.model)
    target = read_target_weights(text.model, 0, spec, "cpu")
    target = TargetWeights(target.embedding.float(), target.head.float(), 0)
    tokens = int(text.response_tokens(spec.vocab_size).sum())
    print(f"{len(text.training)} rollouts, {tokens} response tokens; {len(text.held_out)} rollouts held out")
    known, columns = arms(args.vocabulary, args.depth), [("drawn", DRAWN, k) for k in LENGTHS]
    columns += [("likeliest", LIKELIEST, k) for k in LENGTHS[1:]]
    heads = [f"{how}, k = {k}" for how, _, k in columns]
    print(f"| drafter | objective | seed | updates | CPU s | {' | '.join(heads)} |")
    print("|---|---|" + "--:|" * (len(columns) + 3))
    start = ", random start" * args.random_start
    start += ", all logits" * args.all_logits
    start += f", starts in runs of {args.anchor_run}" * (args.anchor_run != ANCHOR_RUN)
    for seed, name, objective in itertools.product(args.seeds, args.arms or known, args.objectives):
        drafter, started = build_drafter(known[name], spec, seed), time.process_time()
        budget = Budget(args.cpu_seconds, args.updates)
        updates = train(drafter, text, target, seed, budget, objective, args.anchors)
        spent = time.process_time() - started
        parts = {how: compared(drafter, text.held_out, target, how) for how in (DRAWN, LIKELIEST)}
        lengths = [length(parts[sampling], k) for _, sampling, k in columns]
        cells = " | ".join(f"{value:.3f}" if value else "" for value in lengths)
        print(f"| {name}{start} | {objective} | {seed} | {updates} | {spent:.0f} | {cells} |", flush=True)
        if args.results:
            row = {"drafter": name + start, "objective": objective, "seed": seed, "updates": updates, "cpu_s": spent}
            with args.results.open("a") as file:
                file.write(json.dumps(row | dict(zip(heads, lengths, strict=True))) + "\n")
        if args.save:
            folder = args.save / f"{name.replace(', ', '-').replace(' ', '-')}-{objective}-{seed}"
            drafter.save(folder, torch.float32)
    if args.results:
        print("\n" + table_of_means([json.loads(line) for line in args.results.read_text().splitlines()], heads))
    return 0


def table_of_means(rows: list[dict[str, Any]], heads: list[str]) -> str:
    """Return a Markdown table of the means over seeds, with standard errors where there are several."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["drafter"], row["objective"]), []).append(row)

    def cell(values: list[float | None]) -> str:
        known = [value for value in values if value]
        if len(known) < 2:
            return "".join(f"{value:.3f}" for value in known)
        return f"{fmean(known):.3f} ± {stdev(known) / len(known) ** 0.5:.3f}"

    lines = [f"| drafter | objective | seeds | updates | CPU s | {' | '.join(heads)} |"]
    lines.append("|---|---|" + "--:|" * (len(heads) + 3))
    for (name, objective), own in groups.items():
        updates, seconds = (round(fmean(row[field] for row in own)) for field in ("updates", "cpu_s"))
        cells = " | ".join(cell([row[head] for row in own]) for head in heads)
        lines.append(f"| {name} | {objective} | {len(own)} | {updates} | {seconds} | {cells} |")
    return "\n".join(lines)


@dataclass
class Budget:
    """What an arm may spend: updates or, without a number of them, processor seconds."""

    seconds: float
    updates: int | None

    def __post_init__(self) -> None:
        self.started = time.process_time()

    def spent(self, updates: int) -> float:
        """Return the share that is spent after so many updates."""
        return updates / self.updates if self.updates else (time.process_time() - self.started) / self.seconds


def objective_loss(
    objective: str,
    drafter: Drafter,
    batch: DraftBatch,
    target: TargetWeights,
    anchors: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """The loss of a batch. Tokens outside the draft vocabulary have no cross-entropy."""
    if objective == "acceptance":
        return drafter_loss(drafter, batch, target, DRAWN, anchors, generator)[0]
    starts = align(batch, drafter.shape.trained_depth, anchors, generator)
    states, head = drafter.drafts(batch, starts, target)
    teacher = Teacher(batch, target, drafter.draft_to_target, DRAWN)
    compared_rows = torch.cat([starts.target_rows(position) for position in range(len(states))]).unique()
    likeliest_of = (batch.final_hidden[compared_rows] @ target.head.T).argmax(-1) if objective == "argmax" else None
    total, weights = head.new_zeros(()), 0.0
    for position, hidden in enumerate(states):
        chosen, rows = hidden[starts.supervised[position]], starts.target_rows(position)
        if likeliest_of is None:
            wanted = teacher.drawn_draft_ids(rows)
        else:
            likeliest = likeliest_of[torch.searchsorted(compared_rows, rows)]
            wanted = torch.searchsorted(drafter.draft_to_target, likeliest).clamp(max=len(drafter.draft_to_target) - 1)
            wanted = torch.where(drafter.draft_to_target[wanted] == likeliest, wanted, -1)
        weight = math.exp(-position / DECAY)
        total = total + weight * torch.nn.functional.cross_entropy(chosen @ head.T, wanted, ignore_index=-1)
        weights += weight
    return total / weights


def train(
    drafter: Drafter, text: StoredText, target: TargetWeights, seed: int, budget: Budget, objective: str, anchors: float
) -> int:
    """Train until the budget is spent, over which the learning rate follows a cosine. Returns the updates."""
    generator, shuffled, updates = torch.Generator().manual_seed(seed), random.Random(seed), 0
    drafter.choose_vocabulary(text.response_tokens(len(target.head)), target)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    rate = LambdaLR(optimizer, lambda _: _rate(budget.spent(updates)))
    while True:
        order = list(text.training)
        shuffled.shuffle(order)
        for batch, _ in batches_of(order, BATCH_TOKENS):
            if updates == 0:
                drafter.start_training(batch, target, is_new=True)
            optimizer.zero_grad()
            objective_loss(objective, drafter, batch, target, anchors, generator).backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            updates += 1
            if budget.spent(updates) >= 1:
                return updates
            rate.step()


def _rate(share: float) -> float:
    return min(max(share, 0.01) / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def compared(
    drafter: Drafter, records: Sequence[FeatureRecord], target: TargetWeights, sampling: SamplingParams
) -> list[StartAcceptance]:
    return [acceptances([drafter], rows, target, sampling)[0] for rows, _ in batches_of(records, BATCH_TOKENS)]


def length(parts: list[StartAcceptance], k: int) -> float | None:
    """The acceptance length that an engine would count; None if the drafter was not trained for k draft tokens."""
    return 1.0 + sum(rollout_acceptance(parts, k).rates()) if k <= len(parts[0].probability) else None


if __name__ == "__main__":
    sys.exit(main())
