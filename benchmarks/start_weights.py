"""What weight verification positions of starts that are never served should have in the drafter's objective.

    cotrain init configs/quickstart.toml name=starts init.tokens=10000 init.epochs=1 init.holdout=0.14
    python benchmarks/start_weights.py runs/starts [--seeds 0 1] [--epochs 3]

A verification step begins with a generated token. Starts before it can be trained on too. Each arm trains a drafter from
the features that the run has cached, with the same first weights and the same order of batches for a seed, and prints
its expected acceptance length on the held-out rollouts as a Markdown row. Differs between arms: the weight of a start at a
position of which an earlier one is unknown, because it predicts a token of the prompt.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import drafters.losses
from cotrain.drafting.buffer import batches_of
from cotrain.drafting.features import FeatureRecord, read_shard
from cotrain.drafting.target_weights import read_target_weights
from cotrain.load_config import load_config
from cotrain.models import resolve_model
from drafters.acceptance import rollout_acceptance
from drafters.base import Sampler, TargetSpec
from drafters.build import build_drafter
from drafters.config import ObjectiveConfig

SHORT_ANSWER = 10

Reach = Callable[[Tensor, Tensor, ObjectiveConfig], Tensor]

ARMS: dict[str, Reach | None] = {
    "reach, nothing": lambda before, served, _: before.nan_to_num(0.0).prod(0) * served,
    "reach, as certainly reached": lambda before, served, _: before.nan_to_num(1.0).prod(0),
    "reach, as likely as depth_decay": lambda before, served, o: before.nan_to_num(o.depth_decay).prod(0),
    "decay": None,
}
"""Weight [S'] of some starts at a position, from the acceptance [k, S'] of the positions before it (NaN where unknown) and
from whether each start is served [S']."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of a `cotrain init` with cached features")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default 0 1")
    parser.add_argument("--epochs", type=int, default=3, help="default %(default)s")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    args = parser.parse_args()
    print("| starts that are never served | seed | all | short answers | others | accepted at position 1, 2, 3 |")
    print("|---|---|---|---|---|---|")
    for seed in args.seeds:
        for arm in args.arms:
            print(row(args.run, arm, seed, args.epochs), flush=True)
    return 0


def row(run: Path, arm: str, seed: int, epochs: int) -> str:
    """Train one arm and judge it."""
    config = load_config([run / "config.json"])
    assert config.drafter is not None
    model = resolve_model(config.policy.model)
    spec = TargetSpec.from_pretrained(model)
    target = read_target_weights(model, 0, spec, "cpu")
    rollout = config.rollout
    sampler = Sampler(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
    weights = ARMS[arm]
    objective = config.drafter.objective.model_copy(update={"depth_weights": "reach" if weights else "decay"})
    if weights:
        drafters.losses.reach_weights = weights
    training = [record for shard in sorted((run / "features").glob("training_*")) for record in read_shard(shard)]
    holdout = read_shard(run / "features" / "holdout.safetensors")

    drafter = build_drafter(config.drafter.model, spec, seed)
    drafter.choose_vocabulary(response_tokens(training, spec.vocab_size), target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=config.drafter.optimizer.learning_rate, weight_decay=0.0)
    order = random.Random(seed)
    for _ in range(epochs):
        for batch in batches_of(order.sample(training, len(training)), config.drafter.batch_tokens):
            optimizer.zero_grad()
            drafter.loss(batch, target, sampler, objective).loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()

    batches = batches_of(holdout, config.drafter.batch_tokens)
    parts = [drafters.losses.acceptances([drafter], batch, target, sampler, objective)[0] for batch in batches]
    scored = rollout_acceptance(parts, rollout.draft_tokens)
    short = torch.tensor([r.num_tokens - r.prompt_length <= SHORT_ANSWER for r in holdout])
    lengths = [length_of(scored.steps, scored.accepted, rows) for rows in (short | ~short, short, ~short)]
    rates = " ".join(f"{rate:.2f}" for rate in (scored.accepted.sum(0) / scored.steps.sum()).tolist())
    cells = [arm, str(seed), *(f"{length:.3f}" for length in lengths), rates]
    return f"| {' | '.join(cells)} |"


def response_tokens(records: Sequence[FeatureRecord], vocab_size: int) -> Tensor:
    """Count of each token [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for record in records:
        counts += torch.bincount(record.token_ids[record.prompt_length :], minlength=vocab_size)
    return counts


def length_of(steps: Tensor, accepted: Tensor, rows: Tensor) -> float:
    return 1 + float(accepted[rows].sum() / steps[rows].sum())


if __name__ == "__main__":
    sys.exit(main())
