"""`cotrain verify`: is this engine, with this drafter and these settings, lossless? docs/internals/verify.md explains the method."""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cotrain.config.load import load_config
from cotrain.config.schema import HistoryConfig, RolloutConfig
from cotrain.lossless.family import Verdict, detectable_distance, tokens_for_distance
from cotrain.lossless.setting import STANDARD_SAMPLINGS, standard_settings
from cotrain.weights.payload import write_payload
from drafters.base import SamplingParams
from drafters.files import write_json
from pipelines import engines
from pipelines.engines import at_least
from pipelines.help import CommandParser
from pipelines.verify.checks import Plan, Verifier, perturbed, target_distributions

NUM_PROMPTS = 64


def build_parser() -> argparse.ArgumentParser:
    """The options of `cotrain verify`."""
    parser = CommandParser("verify")
    parser.add_argument("--config", metavar="CONFIG", help="model, prompts, sampling, k and dtype of this run")
    engines.add_engine_options(parser, "verify", tokens=48)
    text = "draft from what was generated before, in place of a drafter (default with [rollout.history] in --config)"
    parser.add_argument("--history", action="store_true", help=text)
    parser.add_argument("--k", type=at_least(1), help="longest draft; all shorter ones are tried too (default 3)")
    parser.add_argument("--batch", type=at_least(1), default=32, help="most requests at once (default %(default)s)")
    parser.add_argument("--alpha", type=share, default=0.01, help="rate of false alarms (default %(default)s)")
    parser.add_argument("--distance", type=share, default=0.05, help="total variation to find (default %(default)s)")
    return parser


def share(text: str) -> float:
    """A number between 0 and 1, as a type for argparse."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for errors that the user can fix, before an engine starts."""
    args = build_parser().parse_args(argv)
    with engines.prepared_command("verify", args, prepare) as (out, (plan, setup), say):
        verdict = asyncio.run(_verify(plan, setup, args.threads, say))
        write_json(out / "verify.json", engines.provenance(args) | outcome(verdict))
        for failed in verdict.failures:
            say(f"FAIL {failed.check}, {failed.setting}: p {failed.p:.2g}")
        say(f"{verdict}\nwritten to {out}/: verify.json, engine.log")
    return 0 if verdict.passed else 1


def prepare(args: argparse.Namespace, pulled: Path) -> tuple[Plan, engines.EngineSetup]:
    """Check the options, load the drafter, encode the prompts. A drafter of the registry is copied to `pulled`.

    Options that are not set come from the configuration. Each setting gets enough tokens to find --distance, see
    `tokens_for_distance`, at the strictest level of all checks together. Raises ValueError naming the option and the fix.
    """
    config = load_config([args.config]) if args.config else None
    configured = config.rollout if config else RolloutConfig()
    args.model = args.model or (config.policy.model if config else None)
    history = args.history or (configured.history is not None and not args.drafter)
    if not args.model or history == bool(args.drafter):
        fix = "give a model, which a --config names too, and either a drafter or --history"
        raise ValueError(f"--model, --drafter: {fix}")
    args.k, args.dtype = args.k or configured.num_speculative_tokens, args.dtype or configured.dtype
    samplings: tuple[SamplingParams, ...] = STANDARD_SAMPLINGS
    if config and configured.temperature > 0:  # greedy text is always checked
        samplings = (SamplingParams(configured.temperature, configured.top_p, configured.top_k, ""),)
    task = config.task if config else engines.DEFAULT_TASK
    rollout = {"num_speculative_tokens": args.k, "ignore_eos": True, "vllm": configured.vllm}
    rollout |= {"history": HistoryConfig()} if history else {}
    setup = engines.prepare_engine(args, task, NUM_PROMPTS, args.batch, pulled, **rollout)
    drafter = setup.drafter
    num_orders = 2 if drafter and len(drafter.draft_to_target) < drafter.shape.sizes.vocab_size else 1
    settings = standard_settings(args.k, samplings)
    num_checks = args.k + 1 + sum(setting.num_checks(num_orders) for setting in settings)
    size = tokens_for_distance(args.distance, args.alpha / num_checks)
    plan = Plan(settings, setup.prompts, args.k, args.tokens, size, args.dtype, args.seed, args.alpha)
    return plan, setup


async def _verify(plan: Plan, setup: engines.EngineSetup, threads: int, say: Callable[[str], None]) -> Verdict:
    """Load the target model that gives the distributions, start the engine, generate, and judge."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype, drafter = getattr(torch, plan.dtype), setup.drafter
    target = AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype).float().eval()
    distributions = target_distributions(target, drafter.draft_to_target.tolist() if drafter else None, plan.dtype)
    say("starting the engine")
    async with engines.one_engine(setup, plan.seed, threads) as engine:
        folder, state = Path(engine.spec.scratch), drafter.state_for_serving() if drafter else {}
        states = {"one.safetensors": state, "other.safetensors": perturbed(state, plan.seed)} if drafter else {}
        drafters = [write_payload(tensors, folder / name, dtype) for name, tensors in states.items()]
        return await Verifier(engine, plan, distributions, drafters, say).verdict()


def outcome(verdict: Verdict) -> dict[str, Any]:
    """The results for verify.json. `finds` is the total variation distance that a uniformity check would detect."""
    level, failures = verdict.alpha / len(verdict.results), verdict.failures
    checks = []
    for result in verdict.results:
        finds = detectable_distance(result.num, level) if result.check.startswith("uniformity") else None
        checks.append(asdict(result) | {"finds": finds, "failed": result in failures})
    return {
        "passed": verdict.passed,
        "verdict": str(verdict),
        "false_alarm_rate": verdict.alpha,
        "smallest_adjusted_p": min(result.adjusted_p for result in verdict.results),
        "checks": checks,
    }
