"""`cotrain bench`: speculation arms side by side on the same prompts, taking turns.

No speculation is measured on a stock engine, scheduled as vLLM schedules without us. A second engine serves the arms
of the drafter, switched at run time, and a third looks up n-grams; an engine that waits does not use the CPU. In every
round all arms run once, each round starting with another arm, and each is compared with the same round's no-speculation
arm, so that a machine that slows down slows all of them alike.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cotrain.config.files import write_json
from cotrain.config.load import load_config
from cotrain.process.engine_output import engine_output_to
from cotrain.records import RolloutRequest
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.run.console import duration
from cotrain.run.provenance import machine
from pipelines.bench.report import ADAPTIVE, METHODS, NO_SPECULATION, Arm, Turn, markdown, results
from pipelines.engines import (
    DEFAULT_TASK,
    EngineSetup,
    add_engine_options,
    at_least,
    new_folder,
    one_engine,
    prepare_engine,
    provenance,
)

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine

DRAFTED = ("greedy", "probabilistic", ADAPTIVE)
DESCRIPTION = "Speculation arms side by side on the same prompts, taking turns: tokens/s and acceptance length of each."
GPU_SHARE = 0.9
"""Share of a GPU's memory for all engines together."""


@dataclass(frozen=True)
class Bench:
    """What is measured, with everything checked that can be without an engine."""

    options: argparse.Namespace
    arms: list[Arm]
    setup: EngineSetup
    notes: list[str]

    def requests(self, batch: int, round_: int, group: int) -> list[RolloutRequest]:
        """The same prompts and lengths for all arms of a round, new ones in each round.

        None has a seed: generators of single requests would slow down the sampler, and probabilistic drafts have none.
        """
        options, prompts = self.options, self.setup.prompts
        lengths: list[int | None] = [None] * batch
        if options.drain:  # evenly spread
            lengths = [max(2, ceil(options.tokens * (i + 1) / batch)) for i in range(batch)]
        first = (round_ * options.groups + group) * batch
        return [
            RolloutRequest(f"prompt-{first + i}", first + i, prompts[(first + i) % len(prompts)], None, length)
            for i, length in enumerate(lengths)
        ]


def engine_of(arm: Arm) -> str:
    """Which engine serves an arm."""
    return {"none": "stock", "ngram": "ngram"}.get(arm.method, "drafter")


def engines_of(arms: Sequence[Arm]) -> list[str]:
    """The engines that are needed."""
    return list(dict.fromkeys(map(engine_of, arms)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cotrain bench`."""
    add_engine_options(parser, "bench", tokens=64)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--k", type=at_least(1), nargs="+", default=[1, 2, 3], help="draft lengths (default 1 2 3)")
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 4, 16], help="batch sizes (default 1 4 16)")
    parser.add_argument(
        "--stop-at-eos", action="store_true", help="responses end where the model ends them, after --tokens at most"
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="the responses of a batch end one after another, the last after --tokens, alike in all arms",
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns of every arm (default %(default)s)")
    parser.add_argument(
        "--groups", type=at_least(1), default=1, help="batches in a turn, one after another (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default %(default)s)")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        help="default: all that are possible but adaptive, which chooses a draft length up to the largest of --k for "
        "each batch size; none is always measured",
    )
    parser.add_argument("--prompts", metavar="CONFIG", help="prompts of this configuration's task (default: chain_sum)")


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    parser = argparse.ArgumentParser(prog="cotrain bench", description=DESCRIPTION)
    add_arguments(parser)
    options = parser.parse_args(argv)
    out = new_folder(options.out, "bench")
    about = provenance(options) | {"load": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as pulled:
        bench = prepare(options, Path(pulled) / "drafter")
        out.mkdir(parents=True, exist_ok=True)
        with engine_output_to(out / "engine.log") as console:
            turns = asyncio.run(_run(bench, console))
            write_results(out, about | {"notes": bench.notes}, turns)
            print(f"\n{(out / 'bench.md').read_text()}\nwritten to {out}/", file=console)
    return 0


def write_results(out: Path, about: dict[str, Any], turns: list[Turn]) -> None:
    """Write bench.json, bench.md and bench.png."""
    from pipelines.page.figures import range_figure

    found = results(turns)
    arms = [
        {"name": name, **row} for name, row in found.astype(object).where(found.notna(), None).to_dict("index").items()
    ]
    write_json(out / "bench.json", about | {"arms": arms, "turns": [asdict(turn) for turn in turns]})
    (out / "bench.md").write_text(markdown(about, found))
    range_figure(found, "tokens/s, ratio to no speculation").savefig(out / "bench.png", dpi=120)


def prepare(options: argparse.Namespace, pulled: Path) -> Bench:
    """Check the options and encode the prompts. A drafter of the registry is copied to the folder `pulled`.

    Raises ValueError naming the option and the fix.
    """
    if options.model is None:
        raise ValueError("--model: give a folder, a hub id, or bundled:smollm2-135m-instruct")
    if options.temperature < 0:
        raise ValueError(f"--temperature: {options.temperature} is below 0")
    if options.drain and options.stop_at_eos:
        raise ValueError("--drain: gives every response its length, --stop-at-eos lets the model end it; leave one out")
    arms = choose_arms(options.methods, sorted(set(options.k)), options.drafter is not None, options.temperature)
    task = load_config([options.prompts]).task if options.prompts else DEFAULT_TASK
    batch, most = max(options.batch), max(options.k)
    setup = prepare_engine(
        options,
        task,
        batch * options.rounds * options.groups,
        batch,
        pulled,
        temperature=options.temperature,
        ignore_eos=not options.stop_at_eos,
        num_speculative_tokens=most,
        synchronous_batches=True,
        vllm={"gpu_memory_utilization": GPU_SHARE / len(engines_of(arms))} if machine()["gpus"] else {},
    )
    notes = []
    if setup.drafter is not None and most > (depth := setup.drafter.trained_depth):
        notes.append(f"k = {most} is beyond the {depth} draft positions the drafter was trained for")
    return Bench(options, arms, setup, notes)


def choose_arms(
    methods: list[str] | None, draft_lengths: list[int], has_drafter: bool, temperature: float
) -> list[Arm]:
    """No speculation first, then every method at every draft length. Raises ValueError for what cannot be measured."""
    if methods is None:
        methods = [m for m in METHODS if (has_drafter or m not in DRAFTED) and m != ADAPTIVE]
        methods = [m for m in methods if temperature > 0 or m != "probabilistic"]
    without_drafter = [m for m in methods if m in DRAFTED and not has_drafter]
    if without_drafter:
        raise ValueError(f"--methods: {' and '.join(without_drafter)} need a drafter; give --drafter")
    if "probabilistic" in methods and temperature == 0:
        raise ValueError("--methods: probabilistic drafts are greedy ones at --temperature 0; use greedy")
    fixed = [Arm(m, k) for m in METHODS[1:-1] if m in methods for k in draft_lengths]
    return [NO_SPECULATION, *fixed, *([Arm(ADAPTIVE, max(draft_lengths))] if ADAPTIVE in methods else [])]


async def _run(bench: Bench, console: TextIO) -> list[Turn]:
    """Start the engines, warm up, and take turns."""
    for note in bench.notes:
        print(f"note: {note}", file=console)
    engines: dict[str, RolloutEngine] = {}
    stock = replace(bench.setup, drafter=None, drafter_folder=None)
    async with AsyncExitStack() as stack:
        for name in engines_of(bench.arms):
            print(f"starting an engine: {name}", file=console)
            setup = bench.setup if name == "drafter" else stock
            start = one_engine(setup, bench.options.seed, bench.options.threads, ngram=name == "ngram")
            engines[name] = await stack.enter_async_context(start)
        if not any(arm.method == ADAPTIVE for arm in bench.arms):
            return await take_turns(bench, engines, console)
        engine = engines["drafter"]
        await engine.set_draft_sample_method(_draft_sample_method(bench, ADAPTIVE))
        print(f"timed draft lengths: {await engine.time_draft_lengths(bench.setup.prompts)} timings", file=console)
        turns = await take_turns(bench, engines, console)
        await engine.set_num_speculative_tokens(None)  # the last arm may have fixed it
        bench.notes.append(f"adaptive, at the end: {await engine.describe_speculation()}")
        return turns


def _draft_sample_method(bench: Bench, method: str) -> str:
    """How the drafter's tokens are sampled; the adaptive arm drafts as well as it can."""
    if method == ADAPTIVE:
        return "probabilistic" if bench.options.temperature > 0 else "greedy"
    return method


async def take_turns(bench: Bench, engines: dict[str, "RolloutEngine"], console: TextIO) -> list[Turn]:
    """Every arm at every batch size in every round, after one round that is not counted."""
    turns: list[Turn] = []
    rounds, started = bench.options.rounds, time.monotonic()
    for round_ in range(-1, rounds):  # round -1 warms up: kernels, allocator and caches of every batch size
        shift = max(round_, 0) % len(bench.arms)
        for batch in sorted(set(bench.options.batch)):
            for arm in bench.arms[shift:] + bench.arms[:shift]:
                turn = await _measure(engines[engine_of(arm)], bench, arm, batch, round_)
                turns += [turn] if round_ >= 0 else []
        left = (time.monotonic() - started) / (round_ + 2) * (rounds - 1 - round_)
        name = f"round {round_ + 1}/{rounds}" if round_ >= 0 else "warm-up"
        print(f"{name}: about {duration(left, 0)} left", file=console)
    return turns


async def _measure(engine: "RolloutEngine", bench: Bench, arm: Arm, batch: int, round_: int) -> Turn:
    if arm != NO_SPECULATION:
        await engine.set_num_speculative_tokens(None if arm.method == ADAPTIVE else arm.num_speculative_tokens)
    if arm.method in DRAFTED:
        await engine.set_draft_sample_method(_draft_sample_method(bench, arm.method))
    await engine.reset_prefix_cache()
    num_tokens, decode_seconds, full_tokens, full_seconds = 0, 0.0, 0, 0.0
    drafted = []
    for group in range(bench.options.groups):
        generated = await engine.generate(bench.requests(batch, max(round_, 0), group), tap=False)
        num_tokens += generated.num_generated_tokens - batch
        decode_seconds += engine.decode_seconds
        if not (bench.options.drain or bench.options.stop_at_eos):
            tokens, seconds = engine.decoded.get(batch, (0, 0.0))
            full_tokens, full_seconds = full_tokens + tokens, full_seconds + seconds
        drafted.append(generated.speculation)
    if not num_tokens:
        raise ValueError("--groups: every response of a turn ended with its first token; give more")
    counts = total_counts(drafted)
    return Turn(
        arm=str(arm),
        batch=batch,
        round=round_,
        num_tokens=num_tokens,
        decode_seconds=decode_seconds,
        num_drafts=counts.num_drafts if counts else 0,
        accepted_per_position=counts.accepted_per_position[: arm.num_speculative_tokens] if counts else (),
        full_tokens=full_tokens,
        full_seconds=full_seconds,
    )
