"""`cotrain verify`: is this engine, with this drafter and these settings, lossless?

One engine generates with and without speculation. Greedy text must be the same; every sampled token is held against
the target's own law. All checks together raise a false alarm with a stated probability at most. Exit status 1: not
lossless.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from cotrain.config.files import write_json
from cotrain.config.load import load_config
from cotrain.config.schema import RolloutConfig
from cotrain.lossless.family import judge, tokens_for_distance
from cotrain.lossless.setting import STANDARD_SAMPLINGS, standard_settings
from cotrain.process.engine_output import engine_output_to
from drafters.base import Drafter, SamplingParams
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
from pipelines.verify.checks import Laws, Plan, Progress, Verifier, target_laws, two_drafters
from pipelines.verify.report import Outcome, markdown, to_json

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine

DESCRIPTION = "Is speculation on this engine lossless? Greedy identity and statistical tests of sampled tokens."

NUM_PROMPTS = 64


@dataclass(frozen=True)
class Verification:
    """What is verified, with everything checked that can be without an engine."""

    plan: Plan
    setup: EngineSetup
    drafter: Drafter
    notes: list[str]


def build_parser() -> argparse.ArgumentParser:
    """The options of `cotrain verify`."""
    parser = argparse.ArgumentParser(prog="cotrain verify", description=DESCRIPTION)
    parser.add_argument("--config", metavar="CONFIG", help="model, prompts, sampling, k and dtype of this run")
    add_engine_options(parser, "verify", tokens=48)
    parser.add_argument("--k", type=at_least(1), help="longest draft; all shorter ones are tried too (default 3)")
    parser.add_argument("--batch", type=at_least(1), default=32, help="most requests at once (default %(default)s)")
    parser.add_argument(
        "--alpha", type=share, default=0.01, help="false-alarm rate of all checks (default %(default)s)"
    )
    parser.add_argument(
        "--distance", type=share, default=0.05, help="find this total variation distance or more (default %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=at_least(1), default=1, help="make the sampled checks so often, to count alarms (default 1)"
    )
    return parser


def share(text: str) -> float:
    """A number between 0 and 1, as a type for argparse."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    args = build_parser().parse_args(argv)
    out = new_folder(args.out, "verify")
    with tempfile.TemporaryDirectory() as pulled:
        verification = prepare(args, Path(pulled) / "drafter")
        out.mkdir(parents=True, exist_ok=True)
        with engine_output_to(out / "engine.log") as console:
            for note in verification.notes:
                print(f"note: {note}", file=console)
            outcome = asyncio.run(_run(args, verification, console))
            about = provenance(args) | {
                "settings": [str(setting) for setting in verification.plan.settings],
                "tokens_per_setting": verification.plan.tokens,
                "notes": verification.notes,
            }
            write_json(out / "verify.json", about | to_json(outcome))
            (out / "verify.md").write_text(markdown(about, outcome))
            for result in outcome.shown.failures:
                print(f"FAIL {result.check}, {result.setting}: p {result.p:.2g}", file=console)
            print(f"{outcome}\nwritten to {out}/: verify.json, verify.md, engine.log", file=console)
    return 0 if outcome.passed else 1


def prepare(args: argparse.Namespace, pulled: Path) -> Verification:
    """Check the options, load the drafter, encode the prompts. A registry's drafter is copied to `pulled`.

    Options that were not given are set to the configuration's. Raises ValueError naming the option and the fix.
    """
    config = load_config([args.config]) if args.config else None
    asked = config.rollout if config else RolloutConfig()
    args.model = args.model or (config.policy.model if config else None)
    if not args.model or not args.drafter:
        raise ValueError("--model and --drafter: give both; a --config names a model too")
    args.k, args.dtype = args.k or asked.num_speculative_tokens, args.dtype or asked.dtype
    samplings = STANDARD_SAMPLINGS
    if config and asked.temperature > 0:  # greedy text is always checked
        samplings = (SamplingParams(asked.temperature, asked.top_p, asked.top_k, ""),)
    setup = prepare_engine(
        args,
        config.task if config else DEFAULT_TASK,
        NUM_PROMPTS,
        args.batch,
        pulled,
        num_speculative_tokens=args.k,
        ignore_eos=True,
        vllm=asked.vllm,
    )
    drafter, notes = setup.drafter, []
    assert drafter is not None
    if args.k > drafter.trained_depth:
        notes.append(f"k = {args.k} is beyond the {drafter.trained_depth} draft positions the drafter was trained for")
    num_orders = 2 if len(drafter.draft_to_target) < setup.target.vocab_size else 1
    return Verification(plan_of(args, samplings, setup.prompts, num_orders), setup, drafter, notes)


def plan_of(
    args: argparse.Namespace, samplings: tuple[SamplingParams, ...], prompts: list[list[int]], num_orders: int
) -> Plan:
    """Settings, and tokens enough that each finds --distance with probability POWER at the family's strictest level."""
    settings = standard_settings(args.k, samplings)
    num_checks = args.k + 1 + sum(setting.num_checks(num_orders) for setting in settings)
    tokens = tokens_for_distance(args.distance, args.alpha / num_checks)
    return Plan(tuple(settings), args.k, prompts, args.tokens, tokens, args.dtype, args.seed)


async def _run(args: argparse.Namespace, verification: Verification, console: TextIO) -> Outcome:
    """Load the target for the laws, start the engine, generate, judge."""
    laws = _laws(verification)
    print("starting the engine", file=console)
    async with one_engine(verification.setup, args.seed, args.threads) as engine:
        return await verify_engine(engine, args, verification, laws, console)


def _laws(verification: Verification) -> Laws:
    """The engine's weights, rounded as it rounds them, then computed with in float32."""
    from transformers import AutoModelForCausalLM

    dtype = verification.plan.dtype
    model = AutoModelForCausalLM.from_pretrained(verification.setup.model, dtype=getattr(torch, dtype)).float().eval()
    return target_laws(model, verification.drafter.draft_to_target.tolist(), dtype)


async def verify_engine(
    engine: "RolloutEngine", args: argparse.Namespace, verification: Verification, laws: Laws, console: TextIO
) -> Outcome:
    """Greedy checks once, sampled ones as often as asked; each repeat is judged together with the greedy checks."""
    plan = verification.plan
    progress = Progress(
        plan.num_speculative_tokens + 2 + args.repeat * len(plan.settings), lambda line: print(line, file=console)
    )
    verifier = Verifier(
        engine, plan, laws, two_drafters(verification.drafter, plan, Path(engine.spec.scratch)), progress
    )
    greedy = await verifier.greedy()
    verdicts = []
    for repeat in range(args.repeat):
        verdicts.append(judge([*greedy, *await verifier.sampled(repeat)], args.alpha))
        if args.repeat > 1:
            print(f"repeat {repeat + 1}/{args.repeat}: {verdicts[-1]}", file=console)
    return Outcome(tuple(verdicts))
