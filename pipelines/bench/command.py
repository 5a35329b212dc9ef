"""`cotrain bench`: speculation arms side by side on the same prompts, taking turns (docs/guide/running.md).

In every round each arm runs every batch of prompts once, and each batch starts with another arm. An arm is compared with the
no-speculation arm of the same round, so that a machine that slows down affects all arms alike. A waiting engine uses no CPU.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from pathlib import Path

from cotrain.config.load import Table, load_config, to_toml
from cotrain.config.schema import HistoryConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.records import RolloutRequest
from cotrain.run.console import duration
from cotrain.run.provenance import machine
from pipelines import engines
from pipelines.bench.report import METHODS, NO_SPECULATION, Arm, Turn, roofline, simulated_ms, write_results
from pipelines.bench.synthetic import SHARE, beside, check_synthetic, synthetic_setup
from pipelines.engines import at_least
from pipelines.help import CommandParser

LEARNING_BATCHES = 4
"""Batches of each size in which an adaptive arm learns what its draft lengths cost, before any counts."""


@dataclass(frozen=True)
class Bench:
    """What is measured. All that can be checked without an engine has been checked."""

    options: argparse.Namespace
    arms: list[Arm]
    setup: engines.EngineSetup
    cost: Table = field(default_factory=dict)  # what the simulator needs to know of the engine, see `roofline`

    def requests(self, batch: int, round_: int, group: int) -> list[RolloutRequest]:
        """One batch: the same prompts and lengths for all arms of a round, and new prompts in each round by default.

        Requests have no seeds: a generator for each would slow down the sampler, and probabilistic drafts cannot be seeded.
        """
        options, prompts = self.options, self.setup.prompts
        ends = [max(2, ceil(options.tokens * (i + 1) / batch)) for i in range(batch)]  # evenly spread
        first = (0 if options.same_prompts else round_ * options.groups + group) * batch
        return [
            RolloutRequest(f"prompt-{first + i}", first + i, prompts[(first + i) % len(prompts)], None, end)
            for i, end in enumerate(ends if options.drain else [None] * batch)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engines.add_engine_options(parser, "bench", tokens=64)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--k", type=at_least(1), nargs="+", default=[1, 2, 3], help="draft lengths (default 1 2 3)")
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 4, 16], help="batch sizes (default 1 4 16)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--stop-at-eos", action="store_true", help="the model ends responses, after --tokens at most")
    text = "the responses of a batch end one after another, the last after --tokens, alike in all arms"
    ends.add_argument("--drain", action="store_true", help=text)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds over all arms (default %(default)s)")
    text = "batches of each arm in a round, taken in turns (default %(default)s)"
    parser.add_argument("--groups", type=at_least(1), default=1, help=text)
    text = "every round has the prompts of the first, as a run's epochs have"
    parser.add_argument("--same-prompts", action="store_true", help=text)
    parser.add_argument("--temperature", type=at_least(0.0), default=1.0, help="of sampling (default %(default)s)")
    text = (
        "default: greedy and probabilistic with --drafter, else suffix (drafts from earlier rounds). adaptive and adaptive-suffix "
        "choose draft lengths up to the largest --k; none is always measured"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, help=text)
    parser.add_argument("--prompts", metavar="CONFIG", help="prompts of this configuration's task (default: chain_sum)")
    text = "GPU of the simulator whose steps are printed beside (default: the one that is here, if it is known)"
    parser.add_argument("--gpu", help=text)
    text = "write the measured steps here, for `cotrain simulate SYSTEM.toml FILE`"
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help=text)
    own = parser.add_argument_group("without weights", "times of real sizes; no text of it means anything")
    text = "a config.json, the folder of one, or a model of the simulator such as qwen3-8b, in place of --model; --drafter is then"
    own.add_argument(
        "--synthetic", metavar="SHAPE", help=f"{text} eagle3 (default), dflash, dspark, mtp, draft_model or none"
    )
    own.add_argument("--context", type=at_least(1), default=512, help="tokens of a prompt (default %(default)s)")
    text = "share of draft tokens that are accepted if those before them were (default %(default)s)"
    own.add_argument("--accept", type=float, default=0.7, help=text)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for errors that the user can fix, before an engine starts."""
    parser = CommandParser("bench")
    add_arguments(parser)
    options = parser.parse_args(argv)
    load = round(os.getloadavg()[0], 2)
    with engines.prepared_command("bench", options, prepare) as (out, bench, say):
        turns, notes = asyncio.run(_run(bench, say))
        about = engines.provenance(options) | {"load": load, "notes": notes}
        say(f"\n{write_results(out, about, turns, simulated_ms(bench.cost)).read_text()}\nwritten to {out}/")
        if options.calibrate:
            used = [turn for turn in turns if turn.step_ms and (turn.k or turn.arm == str(NO_SPECULATION))]
            cells = {"cells": [(turn.k, turn.batch, turn.step_ms) for turn in used]}
            source = {"cells_source": f"cotrain bench: {engines.headline(about)}"}
            options.calibrate.write_text(to_toml({"cost": bench.cost | cells | source}))
            say(f"for the simulator: cotrain simulate SYSTEM.toml {options.calibrate}")
    return 0


def prepare(options: argparse.Namespace, pulled: Path) -> Bench:
    """Check the options and encode the prompts, see `prepare_engine`. Raises ValueError naming the option and the fix."""
    if (options.model is None) == (options.synthetic is None):
        raise ValueError("--model: give a folder, a hub id, bundled:smollm2-135m-instruct, or --synthetic instead")
    if (file := options.calibrate) and (file.exists() or not file.absolute().parent.is_dir()):
        raise ValueError(f"--calibrate: {file} exists, or its folder does not; give a new file")
    lengths, batch = sorted(set(options.k)), max(options.batch)
    if options.synthetic:
        lengths = [0, *lengths]
        check_synthetic(options)
    arms = choose_arms(options.methods, lengths, options.drafter is not None, options.temperature)
    num_engines, num_prompts = len({arm.engine for arm in arms}), batch * options.rounds * options.groups
    rollout = {"temperature": options.temperature, "ignore_eos": not options.stop_at_eos, "synchronous_batches": True}
    rollout |= {"num_speculative_tokens": max(options.k)}
    rollout |= {"vllm": {"gpu_memory_utilization": SHARE / num_engines}} if machine()["gpus"] else {}
    if options.synthetic:
        setup = synthetic_setup(options, num_prompts, batch, pulled, num_engines, **rollout)
    else:
        task = load_config([options.prompts]).task if options.prompts else engines.DEFAULT_TASK
        setup = engines.prepare_engine(options, task, num_prompts, batch, pulled, **rollout)
    cost = roofline(options, setup)
    simulated_ms(cost)
    return Bench(options, arms, setup, cost)


def choose_arms(
    methods: list[str] | None, draft_lengths: list[int], has_drafter: bool, temperature: float
) -> list[Arm]:
    """No speculation, then each method at each draft length (adaptive: the largest). Raises ValueError if one cannot run."""
    if methods is None:
        methods = ["suffix"] if not has_drafter else ["greedy", "probabilistic"] if temperature > 0 else ["greedy"]
    arms = [Arm(method, k) for method in METHODS[1:] if method in methods for k in draft_lengths]
    without_drafter = dict.fromkeys(arm.method for arm in arms if arm.uses_drafter and not has_drafter)
    if without_drafter:
        raise ValueError(f"--methods: {' and '.join(without_drafter)} need a drafter; give --drafter")
    if "probabilistic" in methods and temperature == 0:
        raise ValueError("--methods: probabilistic drafts are greedy ones at --temperature 0; use greedy")
    return [NO_SPECULATION, *(a for a in arms if not a.adapts or a.num_speculative_tokens == max(draft_lengths))]


async def _run(bench: Bench, say: Callable[[str], None]) -> tuple[list[Turn], list[str]]:
    """Start the engines, warm up, and take turns. Returns the turns, and notes on what each adaptive arm chose at the end."""
    running, notes = dict[str, RolloutEngine](), list[str]()
    stock = replace(bench.setup, drafter=None, drafter_folder=None)
    of_history = replace(stock, rollout=stock.rollout.model_copy(update={"history": HistoryConfig()}))
    async with AsyncExitStack() as stack:
        for name, arm in {arm.engine: arm for arm in bench.arms}.items():
            say(f"starting an engine: {name}")
            setup = bench.setup if arm.uses_drafter else of_history if arm.uses_history else stock
            start, began = engines.one_engine(setup, bench.options.seed, bench.options.threads), time.monotonic()
            running[name] = await stack.enter_async_context(start)
            notes.append(f"start of the engine {name}: {time.monotonic() - began:.1f} s")
        adaptive = {arm: running[arm.engine] for arm in bench.arms if arm.adapts}
        turns = await take_turns(bench, running, say)
        for engine in adaptive.values():
            await engine.set_num_speculative_tokens(None)  # the last arm may have fixed it
        notes += [f"{a.method}, at the end: {await e.describe_speculation()}" for a, e in adaptive.items()]
        if bench.options.synthetic:
            say("tap, swaps and memory")
            notes += await beside(bench.setup, running, bench.requests(max(bench.options.batch), 0, 0))
        return turns, notes


async def take_turns(bench: Bench, running: dict[str, RolloutEngine], say: Callable[[str], None]) -> list[Turn]:
    """Measure every arm at every batch size in every round, after a warm-up that is not counted: one batch each, and more where an
    arm learns what its draft lengths cost.

    The arms take turns with every batch, because a busy neighbour slows a shared machine for seconds to minutes. Raises
    ValueError when an arm has no token to decode in a round.
    """
    rounds, groups, batches = bench.options.rounds, bench.options.groups, sorted(set(bench.options.batch))
    say(f"warm-up, then {rounds} rounds of {groups} x {len(batches)} batches, each by {len(bench.arms)} arms")
    for batch, arm in product(batches, bench.arms):  # kernels, allocator and caches of every batch size
        for _ in range(LEARNING_BATCHES if arm.adapts else 1):
            await _measure(running[arm.engine], bench, arm, batch, 0, 0)
    for name in {arm.engine for arm in bench.arms if arm.uses_history}:
        await running[name].on_workers(EngineWorker.forget_history)
    turns, began = list[Turn](), time.monotonic()
    for round_, batch in product(range(rounds), batches):
        of_round: list[Turn] = []
        for group in range(groups):
            shift = (round_ * groups + group) % len(bench.arms)
            for arm in bench.arms[shift:] + bench.arms[:shift]:
                of_round.append(await _measure(running[arm.engine], bench, arm, batch, round_, group))
        if {turn.arm for turn in of_round if turn.num_tokens} != {turn.arm for turn in of_round}:
            raise ValueError("--groups: every response of a round ended with its first token; give more")
        turns += of_round
        if batch == batches[-1]:  # batch sizes differ in their times, rounds do not
            left = (time.monotonic() - began) / (round_ + 1) * (rounds - round_ - 1)
            say(f"round {round_ + 1}/{rounds}: about {duration(left, 0)} left")
    return turns


async def _measure(engine: RolloutEngine, bench: Bench, arm: Arm, batch: int, round_: int, group: int) -> Turn:
    if arm != NO_SPECULATION:
        await engine.set_num_speculative_tokens(None if arm.adapts else arm.num_speculative_tokens)
    if arm.uses_drafter:
        # Probabilistic drafts are greedy ones at temperature 0.
        await engine.set_draft_sample_method("greedy" if arm.method == "greedy" else "probabilistic")
    await engine.reset_prefix_cache()
    await engine.take_window()
    generated = await engine.generate(bench.requests(batch, round_, group), tap=False)
    timed_tokens = num_tokens = generated.num_generated_tokens - batch
    step_ms = None
    seconds = engine.decode_seconds
    equal_lengths = not (bench.options.drain or bench.options.stop_at_eos)
    steps = [s for s in (await engine.take_window()).steps if s.batch == batch and s.kind != "prompts"]
    if equal_lengths and steps:
        timed_tokens, seconds = sum(step.num_tokens for step in steps), sum(step.seconds for step in steps)
        step_ms = 1e3 * seconds / sum(step.num_steps for step in steps)
    counts, accepted = generated.speculation, tuple(generated.speculation.accepted_per_position)
    k = None if arm.adapts or arm.uses_history else arm.num_speculative_tokens
    return Turn(str(arm), batch, round_, num_tokens, timed_tokens, seconds, counts.total(), accepted, k, step_ms)
