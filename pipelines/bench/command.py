"""`cotrain bench`: speculation arms side by side on the same prompts, taking turns.

One engine with the drafter serves no speculation and every drafted arm, switched at run time; n-gram look-up needs a
second engine, which waits without using the CPU. In the adaptive arm the engine's speculation controller chooses the draft
length. In every round all arms run once, each round starting with another arm, and each is compared with the same
round's no-speculation arm, so that a machine that slows down slows all of them alike.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cotrain.config.files import write_json
from cotrain.config.load import load_config
from cotrain.config.schema import ReasoningGymTask, RolloutConfig
from cotrain.models.linear_attention import serving_problems
from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.engine_output import engine_output_to
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutRequest
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.run.provenance import machine, package_versions
from pipelines.bench.report import ADAPTIVE, NO_SPECULATION, Arm, Measurement, StepTimes, markdown, plot, results

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine
    from drafters.base import Serving

METHODS = ("none", "ngram", "greedy", "probabilistic", ADAPTIVE)
DRAFTED = ("greedy", "probabilistic", ADAPTIVE)
DEFAULT_TASK = ReasoningGymTask(type="reasoning_gym", name="chain_sum")
DESCRIPTION = "Speculation arms side by side on the same prompts, taking turns: tokens/s and acceptance length of each."
KV_BLOCK = 128
GIB = 2**30


@dataclass(frozen=True)
class Bench:
    """What is measured, with everything checked that can be without an engine."""

    arms: list[Arm]
    batches: list[int]
    rounds: int
    groups: int
    seed: int
    model: Path
    drafter: Path | None
    serving: "Serving | None"
    rollout: RolloutConfig
    prompts: list[list[int]]
    threads: int
    breakdown: bool
    notes: list[str]
    drain: bool = False

    @property
    def speculations(self) -> list[str]:
        """The engines needed; the first also serves no speculation."""
        methods = {arm.method for arm in self.arms}
        return [*(["drafter"] if methods & set(DRAFTED) or "ngram" not in methods else []), *(methods & {"ngram"})]

    @property
    def adaptive_sample_method(self) -> str:
        """How the drafter proposes in the adaptive arm: as well as it can."""
        return "probabilistic" if self.rollout.temperature > 0 else "greedy"

    def draft_sample_method(self, arm: Arm) -> str | None:
        """How its draft tokens are sampled; None when no drafter proposes them."""
        if arm.method == ADAPTIVE:
            return self.adaptive_sample_method
        return arm.method if arm.method in DRAFTED else None

    def requests(self, arm: Arm, batch: int, round_: int, group: int) -> list[RolloutRequest]:
        """The same prompts and seeds for all arms of a round. vLLM has no seeds for probabilistic drafts."""
        first = (round_ * self.groups + group) * batch
        numbers = [first + i for i in range(batch)]
        return [
            RolloutRequest(
                f"prompt-{number}",
                number,
                self.prompts[number % len(self.prompts)],
                None if self.draft_sample_method(arm) == "probabilistic" else self.seed + number,
                self._length(i, batch),
            )
            for i, number in enumerate(numbers)
        ]

    def _length(self, index: int, batch: int) -> int | None:
        """Of a batch that drains: evenly spread, at least 2 tokens."""
        return max(2, ceil(self.rollout.max_new_tokens * (index + 1) / batch)) if self.drain else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cotrain bench`."""
    parser.add_argument("--model", required=True, help="folder, hub id, or bundled:smollm2-135m-instruct")
    parser.add_argument("--drafter", help="checkpoint folder, models:/NAME@serving or native; without: none, ngram")
    parser.add_argument("--uri", default="sqlite:///runs/mlflow.db", help="MLflow of models:/... (default %(default)s)")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3], help="draft lengths (default 1 2 3)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="batch sizes (default 1 4 16)")
    parser.add_argument("--tokens", type=int, default=64, help="length of every response (default %(default)s)")
    parser.add_argument(
        "--stop-at-eos", action="store_true", help="responses end where the model ends them, after --tokens at most"
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="the responses of a batch end one after another, the last after --tokens: the batch drains alike in all arms",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm (default %(default)s)")
    parser.add_argument(
        "--groups", type=int, default=1, help="batches of responses in a turn, one after another (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        help="default: all that are possible but adaptive, which chooses a draft length up to the largest of --k for "
        "each batch size; none is always measured",
    )
    parser.add_argument("--prompts", metavar="CONFIG", help="prompts of this configuration's task (default: chain_sum)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and sampling (default %(default)s)")
    parser.add_argument("--threads", type=int, help="OpenMP threads of an engine (default: all cores)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder (default: runs/bench-<date>)")
    parser.add_argument("--breakdown", action="store_true", help="also show where the time of a step goes (CPU only)")


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    parser = argparse.ArgumentParser(prog="cotrain bench", description=DESCRIPTION)
    add_arguments(parser)
    args = parser.parse_args(argv)
    out = args.out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} is not empty; give a new folder")
    with tempfile.TemporaryDirectory() as pulled:
        bench = prepare(args, Path(pulled) / "drafter")
        out.mkdir(parents=True, exist_ok=True)
        with engine_output_to(out / "engine.log") as console:
            about: dict[str, Any] = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": machine() | {"load_average_before": round(os.getloadavg()[0], 2)},
                "packages": package_versions(),
                "options": {
                    name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
                },
                "threads": bench.threads,
                "notes": bench.notes,
            }
            if (load := about["machine"]["load_average_before"]) > about["machine"]["cores"] / 2:
                bench.notes.append(f"the machine was busy before the start (load {load}); mind the range of each ratio")
            for note in bench.notes:
                print(f"note: {note}", file=console)
            measurements, steps = asyncio.run(_run(bench, console))
            found = results(measurements, steps)
            write_json(out / "bench.json", about | found | {"measurements": [m.to_json() for m in measurements]})
            text = markdown(about, found)
            (out / "bench.md").write_text(text)
            plot(found["arms"], out / "bench.png")
            print(f"\n{text}\nwritten to {out}/: bench.json, bench.md, bench.png, engine.log", file=console)
    return 0


# ---------------------------------------------------------------------------------------------------------------
# Before the engines
# ---------------------------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, pulled: Path) -> Bench:
    """Check the options and encode the prompts. A drafter of the registry is copied to the folder `pulled`.

    Raises ValueError naming the option and the fix.
    """
    arms = choose_arms(args.methods, sorted(set(args.k)), args.drafter is not None, args.temperature)
    for name in ("batch", "k"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"--{name}: {min(getattr(args, name))} is below 1")
    for name, least in (("tokens", 2), ("rounds", 1), ("groups", 1), ("seed", 0), ("temperature", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}: {getattr(args, name)} is below {least}")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads: {args.threads} is below 1")
    if args.drain and args.stop_at_eos:
        raise ValueError("--drain: gives every response its length, --stop-at-eos lets the model end it; leave one out")
    gpus = machine()["gpus"]
    if args.breakdown and gpus:
        raise ValueError("--breakdown: times phases on the host's clock, which says nothing of a GPU; leave it out")
    task = load_config([args.prompts]).task if args.prompts else DEFAULT_TASK
    try:
        model = resolve_model(args.model)
    except ValueError as error:
        raise ValueError(str(error).replace("policy.model:", "--model:")) from error
    if problems := serving_problems(model, not gpus, args.dtype, "--dtype", {}):
        raise ValueError(problems[0])

    from drafters.base import TargetSpec

    target = TargetSpec.from_pretrained(model)
    notes: list[str] = []
    drafted = any(arm.method in DRAFTED for arm in arms)
    batches, longest_draft = sorted(set(args.batch)), max(args.k)
    prompts = _prompts(task, args.seed, model, batches[-1] * args.rounds * args.groups)
    longest = max(map(len, prompts))
    positions = longest + args.tokens + longest_draft + 1
    if positions > target.max_position_embeddings:
        raise ValueError(
            f"--tokens: the longest prompt has {longest} tokens, with {args.tokens} more and {longest_draft} drafted "
            f"it is over the {target.max_position_embeddings} positions of {args.model}; lower --tokens"
        )
    drafter, serving = _drafter(args, model, target, positions, pulled, notes) if drafted else (None, None)
    rollout = _rollout_config(args, target, batches[-1], longest, positions)
    if gpus:
        share = 0.9 / (1 + (drafted and any(arm.method == "ngram" for arm in arms)))
        rollout = rollout.model_copy(update={"vllm": rollout.vllm | {"gpu_memory_utilization": share}})
    num_threads = args.threads or threads.num_cores()
    return Bench(
        arms, batches, args.rounds, args.groups, args.seed, model, drafter, serving, rollout, prompts, num_threads,
        args.breakdown, notes, args.drain,
    )  # fmt: skip


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


def _drafter(
    args: argparse.Namespace, model: Path, target: Any, positions: int, pulled: Path, notes: list[str]
) -> tuple[Path, "Serving"]:
    """(checkpoint folder, how it is served), after a look at whether it was made for this target and as many positions."""
    from cotrain.run.registry import drafter_folder
    from drafters.build import load_drafter

    try:
        folder = drafter_folder(args.uri, args.drafter, model, pulled)
        drafter = load_drafter(folder, target, positions)
    except ValueError as error:
        raise ValueError(f"--drafter: {error}") from error
    if max(args.k) > drafter.trained_depth:
        notes.append(
            f"k = {max(args.k)} is beyond the {drafter.trained_depth} draft positions the drafter was trained for"
        )
    return folder, drafter.serving


def _prompts(task_config: Any, seed: int, model: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from cotrain.tasks.base import build_task
    from cotrain.tasks.prompts import PromptEncoder

    task = build_task(task_config, seed)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(model), max_prompt_tokens=sys.maxsize)
    return [encoder.encode(task.prompt(index)) for index in range(min(count, len(task)))]


def _rollout_config(args: argparse.Namespace, target: Any, batch: int, longest: int, positions: int) -> RolloutConfig:
    """One prefill step for the largest batch, and room for all its KV: nothing waits, nothing is preempted."""
    bytes_per_value = {"bfloat16": 2, "float32": 4}[args.dtype]
    layers = target.num_layers + 1  # the drafter's own
    per_token = 2 * layers * target.num_key_value_heads * target.head_dim * bytes_per_value
    kv_bytes = max(GIB, 2 * batch * ceil(positions / KV_BLOCK) * KV_BLOCK * per_token)
    return RolloutConfig(
        prompts_per_step=batch,
        samples_per_prompt=1,
        temperature=args.temperature,
        max_prompt_tokens=longest,
        max_new_tokens=args.tokens,
        ignore_eos=not args.stop_at_eos,
        dtype=args.dtype,
        draft_tokens=max(args.k),
        synchronous_batches=True,
        vllm={
            "kv_cache_memory_bytes": kv_bytes,
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(2048, batch * positions),
        },
    )


# ---------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------


async def _run(bench: Bench, console: TextIO) -> tuple[list[Measurement], list[StepTimes]]:
    """Start the engines, warm up, and take turns."""
    os.environ.update(threads.engine_environment(bench.threads))
    from cotrain.rollout.engine import RolloutEngine
    from cotrain.rollout.spec import EngineSpec

    engines: dict[str, RolloutEngine] = {}
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_folder("bench"))
        for number, speculation in enumerate(bench.speculations, 1):
            print(f"starting engine {number} of {len(bench.speculations)}", file=console)
            spec = EngineSpec(
                rollout=bench.rollout,
                model_path=str(bench.model),
                drafter_folder=str(bench.drafter) if bench.drafter and speculation == "drafter" else None,
                serving=bench.serving,
                seed=bench.seed,
                scratch=str(scratch / speculation),
                speculation="ngram" if speculation == "ngram" else "drafter",
            )
            engines[speculation] = RolloutEngine(spec)
            stack.push_async_callback(engines[speculation].shutdown)
            await engines[speculation].start()
            if bench.breakdown:
                await engines[speculation].time_phases()
        if not any(arm.method == ADAPTIVE for arm in bench.arms):
            return await take_turns(bench, engines, console)
        engine, started = engines["drafter"], time.perf_counter()
        await engine.set_draft_sample_method(bench.adaptive_sample_method)
        number = await engine.time_draft_lengths(bench.prompts)
        print(f"timed draft lengths: {number} timings in {time.perf_counter() - started:.0f} s", file=console)
        turns = await take_turns(bench, engines, console)
        await engine.set_draft_tokens(None)  # the last arm may have fixed it
        bench.notes.append(f"adaptive, at the end: {await engine.describe_speculation()}")
        return turns


async def take_turns(
    bench: Bench, engines: dict[str, "RolloutEngine"], console: TextIO
) -> tuple[list[Measurement], list[StepTimes]]:
    """Every arm at every batch size in every round, after one turn of each that is not counted."""
    first = engines[bench.speculations[0]]
    measurements: list[Measurement] = []
    steps: list[StepTimes] = []
    latest: dict[tuple[Arm, int], float] = {}
    for round_ in range(-1, bench.rounds):  # round -1 warms up: kernels, allocator and caches of every batch size
        for batch in bench.batches:
            started = time.perf_counter()
            shift = max(round_, 0) % len(bench.arms)
            for arm in bench.arms[shift:] + bench.arms[:shift]:
                arm_started = time.perf_counter()
                engine = engines["ngram"] if arm.method == "ngram" else first
                measurement = await _measure(engine, bench, arm, batch, round_)
                step_times = await engine.take_step_times()
                if round_ >= 0:
                    measurements.append(measurement)
                    steps.append(StepTimes(arm, batch, step_times))
                latest[arm, batch] = time.perf_counter() - arm_started
            name = f"round {round_ + 1}/{bench.rounds}" if round_ >= 0 else "warm-up"
            left = _time_left(bench, latest, round_, batch)
            print(f"{name}, batch {batch}: {time.perf_counter() - started:.0f} s{left}", file=console)
    return measurements, steps


def _time_left(bench: Bench, latest: dict[tuple[Arm, int], float], round_: int, batch: int) -> str:
    """From what each arm took last; nothing to go by until all have run."""
    if len(latest) < len(bench.arms) * len(bench.batches):
        return ""
    whole = (bench.rounds - 1 - round_) * sum(latest.values())
    rest = sum(seconds for (_, size), seconds in latest.items() if size > batch)
    minutes, seconds = divmod(round(whole + rest), 60)
    return f", about {minutes}:{seconds:02d} left"


async def _measure(engine: "RolloutEngine", bench: Bench, arm: Arm, batch: int, round_: int) -> Measurement:
    await engine.set_draft_tokens(None if arm.method == ADAPTIVE else arm.draft_tokens)
    if (method := bench.draft_sample_method(arm)) is not None:
        await engine.set_draft_sample_method(method)
    await engine.reset_prefix_cache()
    num_tokens, decode_seconds, seconds = 0, 0.0, 0.0
    full_tokens, full_seconds = 0, 0.0
    drafted = []
    for group in range(bench.groups):
        generated = await engine.generate(bench.requests(arm, batch, max(round_, 0), group), tap=False)
        num_tokens += generated.num_generated_tokens - batch
        decode_seconds += engine.decode_seconds
        seconds += generated.seconds
        if not bench.drain and bench.rollout.ignore_eos:
            tokens, elapsed = engine.decoded.get(batch, (0, 0.0))
            full_tokens, full_seconds = full_tokens + tokens, full_seconds + elapsed
        drafted.append(generated.speculation)
    if not num_tokens:
        raise ValueError("--groups: every response of a turn ended with its first token; give more")
    counts = total_counts(drafted)
    return Measurement(
        arm=arm,
        batch=batch,
        round=round_,
        num_tokens=num_tokens,
        decode_seconds=decode_seconds,
        seconds=seconds,
        full_tokens=full_tokens,
        full_seconds=full_seconds,
        num_drafts=counts.num_drafts if counts else 0,
        num_draft_tokens=counts.num_draft_tokens if counts else 0,
        accepted_per_position=counts.accepted_per_position[: arm.draft_tokens] if counts else (),
    )
