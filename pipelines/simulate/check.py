"""`cotrain simulate --run RUN --check`: does the simulation predict the run that it stands on?"""

from pathlib import Path

import numpy as np

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.rollout import Engines, generate
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import parse_system
from pipelines.simulate.run_base import Run, acceptance_of, recorded, table_of

BOUNDS = {"generation": 0.05, "steps": 0.05, "generation of held-out steps": 0.10}
"""How far what is predicted of a run may be off. The first two replay all steps, the second with what they took beside the engines
on average. The third is of every other pair of steps, by those between: a drafter may be trained in every second step."""


def check_run(folder: Path) -> int:
    """Print what holds. Returns the exit status: 1 if something does not. Raises ValueError where nothing can be checked."""
    status = 0
    for what, (predicted, measured) in compared(recorded(folder)).items():
        error, bound = predicted / measured - 1, BOUNDS[what]
        line = f"{what:<28} predicted {predicted:9.2f} s, measured {measured:9.2f} s: {error:+.1%}, bound {bound:.0%}"
        print(line if abs(error) <= bound else f"{line}  <- off")
        status |= abs(error) > bound
    return int(status)


def compared(run: Run) -> dict[str, tuple[float, float]]:
    """Seconds of all steps together, predicted and measured, for each of BOUNDS."""
    steps = sorted(run.times["step"])
    if run.config.stream.max_policy_lag:
        raise ValueError(
            "--check: with stream.max_policy_lag above 0 steps are generated side by side: none has its own time"
        )
    if len(steps) < 4:
        raise ValueError(f"--check: {len(steps)} whole steps in {run.folder} are too few to hold some out; 4 do")
    held, known = ([n for i, n in enumerate(steps) if (i % 4 > 1) == out] for out in (True, False))
    whole, half = (parse_system(table_of(part), (), "").build() for part in (run, run.only(known)))
    replayed = [generation_seconds(whole, run.only([n]), run.only([n])) for n in steps]
    around = {n: [m for m in known if m < n][-1:] + [m for m in known if m > n][:1] for n in held}
    held_out = [generation_seconds(half, run.only([n]), run.only(around[n])) for n in held]
    step = whole.scheduled(np.array(replayed)).step_seconds
    predicted = sum(replayed), len(steps) * step, sum(held_out) + len(held) * half.generation_overhead
    measured = run.busiest.sum(), run.times["time/step_s"].sum(), run.only(held).times["time/generate_s"].sum()
    return dict(zip(BOUNDS, zip(predicted, map(float, measured), strict=True), strict=True))


def generation_seconds(base: Scenario, step: Run, drafting: Run) -> float:
    """Seconds in which the engines generate a step's responses, each where it was, by the step times of `base`, and by
    the acceptance and the draft lengths at each batch size of `drafting`."""
    decoding = drafting.engine_steps[drafting.engine_steps["kind"] != "prompts"]
    usual = decoding.groupby(["batch", "k"])["num_steps"].sum().unstack(fill_value=0).idxmax(axis=1)
    k = usual.reindex(range(base.engines.max_num_seqs + 1), method="nearest").tolist()
    drafts, alone = drafting.drafts, Engines(1, base.engines.max_num_seqs)
    acceptance = None if drafts.empty else Acceptance(*acceptance_of(drafts))
    seconds = []
    for engine, groups in step.groups.groupby("engine"):
        lengths = [length for group in groups["lengths"] for length in group]
        prompts = groups["prompt_tokens"].repeat(groups["lengths"].map(len)).tolist()
        seconds.append(generate(base.cost, lengths, prompts, alone, k, acceptance, seed=engine).seconds)
    return max(seconds)
