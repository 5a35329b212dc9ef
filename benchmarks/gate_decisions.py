"""What the publish gate decides about drafters that are corrupted, stale, equal and better than the served one.

    python benchmarks/gate_decisions.py configs/in_domain.toml --serving DIR --better DIR... --stale DIR... --out NEW_DIR
    python -m benchmarks.gate_decisions --simulate [--steps 10000] [--only NAME...]      # see gate_simulation.py

Fresh rollouts of the configuration's policy on prompts of another seed, from the real engine, with the hidden states
that it taps; each decision has a step's rollouts of its own. Corrupted: the served drafter with one matrix spoilt.
Equal: with noise of a thousandth on every matrix. What a drafter is worth in truth is measured on all rollouts.
"""

import argparse
import asyncio
import copy
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cotrain.config.load import load_config
from cotrain.config.schema import RolloutConfig, RunConfig
from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutRequest
from cotrain.run.provenance import machine

PROMPTS, SAMPLES = 8, 3
"""Rollouts of one decision."""

EQUAL_NOISE = 1e-3

DAMAGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "not a number": lambda w, g: torch.full_like(w, torch.nan),
    "zeros": lambda w, g: torch.zeros_like(w),
    "noise as large as itself": lambda w, g: w + w.std() * torch.randn(w.shape, generator=g),
    "rows in another order": lambda w, g: w[torch.randperm(len(w), generator=g)],
    "other sign": lambda w, g: -w,
}


@dataclass(frozen=True)
class Verdict:
    """One decision, and the gain in truth where it is known."""

    kind: str
    drafter: str
    publish: bool
    gain: float
    lower_bound: float
    true_gain: float | None
    reason: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--simulate", action="store_true", help="simulated steps; of the other options, use only these two"
    )
    parser.add_argument("--steps", type=int, default=10_000, help="simulated steps of each case (default %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these simulated cases alone")
    real = "--simulate" not in sys.argv
    if real:
        parser.add_argument("config", help="policy, sampling and task, for example configs/in_domain.toml")
    parser.add_argument("--serving", type=Path, required=real, help="checkpoint folder of the served drafter")
    parser.add_argument("--better", type=Path, nargs="+", required=real, help="checkpoint folders, taken in turns")
    parser.add_argument("--stale", type=Path, nargs="+", required=real, help="checkpoint folders, taken in turns")
    parser.add_argument("--trials", type=int, default=20, help="decisions of each kind (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1000, help="of the prompts (default %(default)s)")
    parser.add_argument("--out", type=Path, required=real, help="a new folder")
    args = parser.parse_args()
    if args.simulate:
        from benchmarks import gate_simulation

        return gate_simulation.run(args.only, args.steps)
    if args.out.exists():
        raise SystemExit(f"--out: {args.out} exists; give a new folder")
    config = load_config([args.config])
    rollout = config.rollout.model_copy(update={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES})
    config = config.model_copy(update={"rollout": rollout})
    started = time.perf_counter()
    steps = asyncio.run(generate(config, args.serving, args.trials, args.seed))
    verdicts = decisions(config, steps, args)
    args.out.mkdir(parents=True)
    found = {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(args).items()},
        "rollouts": PROMPTS * SAMPLES,
        "seconds": time.perf_counter() - started,
        "verdicts": [v.__dict__ for v in verdicts],
    }
    (args.out / "gate.json").write_text(json.dumps(found, indent=1))
    text = table(verdicts)
    (args.out / "gate.md").write_text(text + "\n")
    print(text)
    return 0


# ---------------------------------------------------------------------------------------------------------------
# Rollouts
# ---------------------------------------------------------------------------------------------------------------


async def generate(config: RunConfig, drafter: Path, num_steps: int, seed: int) -> list[tuple[list, object]]:
    """(feature records, batch) of each step."""
    from cotrain.engine.arguments import EngineSpec
    from cotrain.engine.engine import RolloutEngine
    from cotrain.transport.features import read_shard
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    model = resolve_model(config.policy.model)
    serving = load_drafter(drafter, TargetSpec.from_pretrained(model)).serving
    os.environ.update(threads.engine_environment(threads.num_cores()))
    steps = []
    with scratch_folder("gate-decisions") as scratch:
        engine = RolloutEngine(EngineSpec(config.rollout, str(model), str(drafter), serving, seed, str(scratch)))
        await engine.start()
        try:
            for number, requests in enumerate(requests_of(config, model, seed, num_steps), 1):
                batch = await engine.generate(requests)
                records = [record for shard in batch.features for record in read_shard(shard)]
                for shard in batch.features:
                    Path(shard).unlink()
                steps.append((records, batch))
                print(
                    f"step {number}/{num_steps}: {batch.num_generated_tokens} tokens in {batch.seconds:.0f} s",
                    flush=True,
                )
        finally:
            await engine.shutdown()
    return steps


def requests_of(config: RunConfig, model: Path, seed: int, num_steps: int) -> Iterator[list[RolloutRequest]]:
    """PROMPTS x SAMPLES of each step, no prompt twice."""
    from transformers import AutoTokenizer

    from cotrain.tasks.base import build_task
    from cotrain.tasks.prompts import encode_prompt

    task = build_task(config.task, seed)
    tokenizer, longest = AutoTokenizer.from_pretrained(model), config.rollout.max_prompt_tokens
    for step in range(num_steps):
        prompts = [(i, encode_prompt(tokenizer, task[i], longest)) for i in range(step * PROMPTS, (step + 1) * PROMPTS)]
        yield [RolloutRequest(f"prompt-{i}", s, ids, None) for i, ids in prompts for s in range(SAMPLES)]


# ---------------------------------------------------------------------------------------------------------------
# Decisions
# ---------------------------------------------------------------------------------------------------------------


def decisions(config: RunConfig, steps: Sequence[tuple[list, object]], args: argparse.Namespace) -> list[Verdict]:
    """args.trials of each kind, each on one step's rollouts."""
    from cotrain.config.schema import DrafterConfig
    from cotrain.publish.decision import Outcome, judge
    from cotrain.publish.evidence import Evidence, FreshScores, Publication
    from cotrain.records import Versions
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    model = resolve_model(config.policy.model)
    target = TargetSpec.from_pretrained(model)
    score = Scorer(config, model, target)
    loaded = {folder: load_drafter(folder, target) for folder in {args.serving, *args.better, *args.stale}}
    by_step = {folder: [score(drafter, records) for records, _ in steps] for folder, drafter in loaded.items()}
    lengths = {folder: length_of(scored) for folder, scored in by_step.items()}
    serving = loaded[args.serving]
    gated = DrafterConfig.model_validate({"model": {"type": "eagle3"}})
    verdicts = []
    for trial, (records, batch) in enumerate(steps):
        kinds = {
            "better": (args.better[trial % len(args.better)], None),
            "stale": (args.stale[trial % len(args.stale)], None),
            "equal": ("noise of a thousandth", noisy(serving, trial)),
            "corrupted": damaged(serving, trial),
        }
        for kind, (name, drafter) in kinds.items():
            candidate = by_step[name][trial] if drafter is None else score(drafter, records)
            prompts = [record.prompt_key for record in records]
            scores = FreshScores(prompts, by_step[args.serving][trial], candidate, updates=1, served_by=[])
            outcome = Outcome(Publication(0, swap_seconds=0.2))
            judge(Evidence(trial, batch, Versions(0, 0), outcome.serving, scores), gated, outcome, left=1)
            [found] = outcome.events
            gain, bound = (found.numbers.get(f"gate/{name}", math.nan) for name in ("gain", "lower_bound"))
            truth = lengths[name] - lengths[args.serving] if drafter is None else None
            verdicts.append(Verdict(kind, str(name), found.kind == "published", gain, bound, truth, found.reason))
            print(f"{trial + 1}/{len(steps)} {kind} ({name}): {found.reason}", flush=True)
    return verdicts


class Scorer:
    """Expected acceptance of a drafter on rollouts, as the trainer scores it."""

    def __init__(self, config: RunConfig, model: Path, target: object):
        from cotrain.trainer.trainer import read_target_weights
        from drafters.base import SamplingParams

        rollout: RolloutConfig = config.rollout
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self._config, self._k = config.drafter, rollout.num_speculative_tokens
        self._weights = read_target_weights(model, 0, target, "cpu")

    @torch.no_grad()
    def __call__(self, drafter, records):
        from cotrain.trainer.buffer import batches_of
        from drafters.acceptance import rollout_acceptances
        from drafters.losses import acceptances

        batches = batches_of(records, self._config.batch_tokens)
        starts = [acceptances([drafter], rows, self._weights, self._sampling)[0] for rows, _ in batches]
        return rollout_acceptances(starts, min(self._k, drafter.shape.trained_depth))


def length_of(scored: Sequence) -> float:
    """Acceptance length over all rollouts."""
    longest = [by_length[-1] for by_length in scored]
    whole = [(s.steps[np.isfinite(s.steps)], s.accepted[np.isfinite(s.steps)]) for s in longest]
    return 1 + float(sum(accepted.sum() for _, accepted in whole) / sum(steps.sum() for steps, _ in whole))


def changed(drafter, change: Callable[[str, Tensor], Tensor]):
    copied = copy.deepcopy(drafter)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(change(name, parameter))
    return copied


def noisy(drafter, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return changed(
        drafter,
        lambda _, w: w + EQUAL_NOISE * w.std() * torch.randn(w.shape, generator=generator) if w.dim() == 2 else w,
    )


def damaged(drafter, number: int) -> tuple[str, object]:
    """One matrix and one damage, another pair for each number."""
    generator = torch.Generator().manual_seed(number)
    matrices = [name for name, w in drafter.named_parameters() if w.dim() == 2]
    damages = list(DAMAGES)
    matrix = matrices[number % len(matrices)]
    damage = damages[(number + number // len(damages)) % len(damages)]
    spoilt = changed(drafter, lambda name, w: DAMAGES[damage](w, generator) if name == matrix else w)
    return f"{matrix}: {damage}", spoilt


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: by kind and drafter, how many were published."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        name = "spoilt matrices" if v.kind == "corrupted" else v.drafter
        groups.setdefault((v.kind, name), []).append(v)
    lines = ["| candidate | drafter | gain on all rollouts | gain as judged | published |", "|---|---|---|---|---|"]
    for (kind, name), found in groups.items():
        gains = sorted(v.gain for v in found if v.gain == v.gain)
        truth = "" if found[0].true_gain is None else f"{found[0].true_gain:+.3f}"
        judged = f"{gains[0]:+.3f} to {gains[-1]:+.3f}" if gains else "none finite"
        lines.append(f"| {kind} | {name} | {truth} | {judged} | {sum(v.publish for v in found)} of {len(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
