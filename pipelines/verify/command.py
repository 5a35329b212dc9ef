"""`cotrain verify`: is this engine, with this drafter and these settings, lossless?

One engine generates with and without speculation. Greedy text must be the same; every sampled token is held against
the target's own law. All checks together raise a false alarm with a stated probability at most. Exit status 1: not
lossless.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch

from cotrain.config.files import write_json
from cotrain.config.load import load_config
from cotrain.config.lossless_guard import sampling_problems
from cotrain.config.schema import ReasoningGymTask, RolloutConfig, RunConfig
from cotrain.lossless.family import judge
from cotrain.lossless.power import level_of_check, texts_for_two_sample, tokens_for_distance
from cotrain.lossless.setting import STANDARD_SAMPLERS, num_checks, standard_settings
from cotrain.models.linear_attention import serving_problems
from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.engine_output import engine_output_to
from cotrain.process.scratch import scratch_folder
from cotrain.run.provenance import machine, package_versions
from cotrain.transport.payload import write_payload
from drafters.base import Drafter, Sampler, TargetSpec
from drafters.build import load_drafter
from pipelines.verify import checks
from pipelines.verify.checks import TWO_SAMPLE_PROMPTS, Laws, Plan
from pipelines.verify.report import Outcome, markdown, to_json

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine

DEFAULT_TASK = ReasoningGymTask(type="reasoning_gym", name="chain_sum")
DESCRIPTION = "Is speculation on this engine lossless? Greedy identity and statistical tests of sampled tokens."
KV_BLOCK = 128
GIB = 2**30
LEAST_TEXTS = 64
"""Of a prompt in each arm of a two-sample check: with fewer, most next tokens are too rare to be compared."""

TWO_SAMPLE_CELLS = 64
"""Cells over which a difference may be spread, for the number of texts of a two-sample check."""


@dataclass(frozen=True)
class Verification:
    """What is verified, with everything checked that can be without an engine."""

    plan: Plan
    model: Path
    drafter_folder: Path
    drafter: Drafter
    draft_vocabulary: list[int] | None
    rollout: RolloutConfig
    repeats: int
    alpha: float
    power: float
    threads: int
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cotrain verify`."""
    parser.add_argument("--config", metavar="CONFIG", help="model, prompts, sampling, k and dtype of this run")
    parser.add_argument("--model", help="folder, hub id, or bundled:smollm2-135m-instruct (default: of --config)")
    parser.add_argument("--drafter", required=True, help="checkpoint folder, models:/NAME@serving or native")
    parser.add_argument("--uri", default="sqlite:///runs/mlflow.db", help="MLflow of models:/... (default %(default)s)")
    parser.add_argument("--prompts", metavar="CONFIG", help="prompts of this configuration's task (default: chain_sum)")
    parser.add_argument("--num-prompts", type=int, default=64, help="different prompts (default %(default)s)")
    parser.add_argument("--k", type=int, help="longest draft; all shorter ones are tried too (default 3)")
    parser.add_argument("--temperature", type=float, help="with --top-p and --top-k: one sampler for the usual three")
    parser.add_argument("--top-p", type=float, help="nucleus sampling (default 1, off)")
    parser.add_argument("--top-k", type=int, help="sample from the k likeliest (default 0, off)")
    parser.add_argument(
        "--alpha", type=float, default=0.01, help="false-alarm rate of all checks (default %(default)s)"
    )
    parser.add_argument("--power", type=float, default=0.9, help="chance to find a fault (default %(default)s)")
    parser.add_argument(
        "--distance", type=float, default=0.05, help="of this total variation distance or more (default %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="length of every response (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="most requests at once (default %(default)s)")
    parser.add_argument(
        "--law", choices=("forward", "none"), default="forward",
        help="hold tokens against a forward pass of the model (default), or only against text without speculation",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, help="sampled checks so often, to count alarms (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and tests (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the engine (default bfloat16)")
    parser.add_argument("--threads", type=int, help="OpenMP threads (default: all cores)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder (default: runs/verify-<date>)")


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    parser = argparse.ArgumentParser(prog="cotrain verify", description=DESCRIPTION)
    add_arguments(parser)
    args = parser.parse_args(argv)
    out = args.out or Path("runs") / f"verify-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} is not empty; give a new folder")
    with tempfile.TemporaryDirectory() as pulled:
        verification = prepare(args, Path(pulled) / "drafter")
        out.mkdir(parents=True, exist_ok=True)
        with engine_output_to(out / "engine.log") as console:
            return _verify(args, verification, out, console)


def _verify(args: argparse.Namespace, verification: Verification, out: Path, console: TextIO) -> int:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "packages": package_versions(),
        "options": options | {"model": str(verification.model)},
        "settings": [str(setting) for setting in verification.plan.settings],
        "tokens_per_setting": verification.plan.tokens,
        "threads": verification.threads,
        "notes": verification.notes,
    }
    for note in verification.notes:
        print(f"note: {note}", file=console)
    outcome = asyncio.run(_run(verification, console))
    write_json(out / "verify.json", about | to_json(outcome))
    (out / "verify.md").write_text(markdown(about, outcome))
    for row in outcome.shown.failures:
        print(f"FAIL {row.result.check}, {row.result.setting}: p {row.result.p:.2g}", file=console)
    print(f"{outcome}\nwritten to {out}/: verify.json, verify.md, engine.log", file=console)
    return 0 if outcome.passed else 1


# ---------------------------------------------------------------------------------------------------------------
# Before the engine
# ---------------------------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, pulled: Path) -> Verification:
    """Check the options, load the drafter, encode the prompts. A registry's drafter is copied to `pulled`.

    Raises ValueError naming the option and the fix.
    """
    config = load_config([args.config]) if args.config else None
    model_name = args.model or (config.policy.model if config else None)
    if model_name is None:
        raise ValueError("--model: give a model, or a --config that names one")
    _check_numbers(args)
    k, dtype = _chosen(args, config)
    try:
        model = resolve_model(model_name)
    except ValueError as error:
        raise ValueError(str(error).replace("policy.model:", "--model:")) from error
    vllm = config.rollout.vllm if config else {}
    if problems := serving_problems(model, not machine()["gpus"], dtype, "--dtype", vllm):
        raise ValueError("; ".join(problems))
    target = TargetSpec.from_pretrained(model)
    prompts = _prompts(args, config, model)
    longest = max(map(len, prompts))
    positions = longest + args.tokens + 2 * k + 2
    if positions > target.max_position_embeddings:
        raise ValueError(
            f"--tokens: the longest prompt has {longest} tokens, with {args.tokens} more and the drafts it is over "
            f"the {target.max_position_embeddings} positions of {model_name}; lower --tokens"
        )
    folder, drafter = _drafter(args, model, target, positions, pulled)
    vocabulary = _draft_vocabulary(drafter, target.vocab_size)
    plan = plan_of(args, k, dtype, _samplers(args, config), prompts, num_orders=2 if vocabulary else 1)
    rollout = _rollout_config(plan, target, args.batch, longest, positions, vllm)
    notes = []
    if k > drafter.trained_depth:
        notes.append(f"k = {k} is beyond the {drafter.trained_depth} draft positions the drafter was trained for")
    if args.law == "none":
        notes.append("no forward pass of the target: log-probs and the place of a token in its step are not tested")
    num_threads = args.threads or threads.num_cores()
    return Verification(
        plan, model, folder, drafter, vocabulary, rollout, args.repeat, args.alpha, args.power, num_threads, notes
    )


def plan_of(
    args: argparse.Namespace,
    k: int,
    dtype: str,
    samplers: tuple[Sampler, ...],
    prompts: list[list[int]],
    num_orders: int,
) -> Plan:
    """Settings, and tokens enough that each finds --distance with --power at the strictest level of the family."""
    settings = standard_settings(k, samplers)
    exact = args.law == "forward"
    num_identity = k + 1
    if exact:
        num = num_identity + 1 + sum(num_checks(setting, num_orders) for setting in settings)
    else:
        num = num_identity + sum(setting.draft_tokens > 0 and not setting.unsteady for setting in settings)
    level = level_of_check(args.alpha, num)
    tokens = tokens_for_distance(args.distance, level, args.power)
    if exact:
        texts = max(ceil(tokens / (k + 2)), LEAST_TEXTS * TWO_SAMPLE_PROMPTS)
    else:
        texts = texts_for_two_sample(args.distance, TWO_SAMPLE_CELLS, level, args.power)
    return Plan(tuple(settings), k, prompts, args.tokens, tokens, texts, exact, level, dtype, args.seed)


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("num_prompts", 4), ("tokens", 2), ("batch", 1), ("repeat", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}: {getattr(args, name)} is below {least}")
    for name, least in (("k", 1), ("threads", 1), ("top_k", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')}: {value} is below {least}")
    if args.temperature is not None and not args.temperature > 0:
        raise ValueError("--temperature: greedy output is always checked; give a positive one, or leave it out")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p: {args.top_p} is not above 0 and at most 1")
    for name in ("alpha", "distance"):
        if not 0 < getattr(args, name) < 1:
            raise ValueError(f"--{name}: {getattr(args, name)} is not between 0 and 1")
    if not 0.5 <= args.power < 1:
        raise ValueError(f"--power: {args.power} is not 0.5 or more and below 1")


def _chosen(args: argparse.Namespace, config: RunConfig | None) -> tuple[int, str]:
    """(longest draft, number format): of the options, then of the configuration."""
    k = args.k or (config.rollout.draft_tokens if config else 3)
    return k, args.dtype or (config.rollout.dtype if config else "bfloat16")


def _samplers(args: argparse.Namespace, config: RunConfig | None) -> tuple[Sampler, ...]:
    """The one that is asked for, or the usual ones. Raises ValueError for what speculation does not keep."""
    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    given = {name: value for name, value in given.items() if value is not None}
    if not given and config is None:
        return STANDARD_SAMPLERS
    own = {name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k")} if config else {}
    parameters = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **own, **given}
    if problems := list(sampling_problems(parameters)):
        raise ValueError("; ".join(f"--{name.replace('_', '-')} {message}" for name, message in problems))
    if parameters["temperature"] == 0:  # the configuration's
        return STANDARD_SAMPLERS
    return (Sampler(parameters["temperature"], parameters["top_p"], parameters["top_k"], ""),)


def _drafter(
    args: argparse.Namespace, model: Path, target: TargetSpec, positions: int, pulled: Path
) -> tuple[Path, Drafter]:
    """(checkpoint folder, drafter), after a look at whether it was made for this target and as many positions."""
    from cotrain.run.registry import drafter_folder

    try:
        folder = drafter_folder(args.uri, args.drafter, model, pulled)
        return folder, load_drafter(folder, target, positions)
    except ValueError as error:
        raise ValueError(f"--drafter: {error}") from error


def _draft_vocabulary(drafter: Drafter, vocab_size: int) -> list[int] | None:
    """Target ids that can be drafted; None when that is all of them."""
    ids: list[int] = drafter.draft_to_target.tolist()
    return ids if len(ids) < vocab_size else None


def _prompts(args: argparse.Namespace, config: RunConfig | None, model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    from cotrain.tasks.base import build_task
    from cotrain.tasks.prompts import PromptEncoder

    task_config = load_config([args.prompts]).task if args.prompts else config.task if config else DEFAULT_TASK
    task = build_task(task_config, args.seed)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(model), max_prompt_tokens=sys.maxsize)
    return [encoder.encode(task.prompt(index)) for index in range(min(args.num_prompts, len(task)))]


def _rollout_config(
    plan: Plan, target: TargetSpec, batch: int, longest: int, positions: int, vllm: dict[str, Any]
) -> RolloutConfig:
    """The run's engine arguments, with room for all KV and tokens of a step: a preemption, or a step without room for
    drafts, would emit tokens that no recorded verification step accounts for."""
    bytes_per_value = {"bfloat16": 2, "float32": 4}[plan.dtype]
    layers = target.num_layers + 1  # the drafter's own
    per_token = 2 * layers * target.num_key_value_heads * target.head_dim * bytes_per_value
    kv_bytes = max(GIB, 2 * batch * ceil(positions / KV_BLOCK) * KV_BLOCK * per_token)
    return RolloutConfig(
        prompts_per_step=batch,
        samples_per_prompt=1,
        max_prompt_tokens=longest + plan.draft_tokens + 1,
        max_new_tokens=plan.response_tokens,
        ignore_eos=True,
        dtype=plan.dtype,  # type: ignore[arg-type]
        draft_tokens=plan.draft_tokens,
        vllm=vllm
        | {
            "kv_cache_memory_bytes": kv_bytes,
            "max_num_seqs": batch,
            "max_num_batched_tokens": max(2048, batch * positions),
        },
    )


# ---------------------------------------------------------------------------------------------------------------
# With the engine
# ---------------------------------------------------------------------------------------------------------------


async def _run(verification: Verification, console: TextIO) -> Outcome:
    """Load the target for the laws, start the engine, generate, judge."""
    os.environ.update(threads.engine_environment(verification.threads))
    from cotrain.rollout.engine import RolloutEngine
    from cotrain.rollout.spec import EngineSpec

    laws = _laws(verification) if verification.plan.exact else None
    with scratch_folder("verify") as scratch:
        print("starting the engine", file=console)
        spec = EngineSpec(
            rollout=verification.rollout,
            model_path=str(verification.model),
            drafter_folder=str(verification.drafter_folder),
            serving=verification.drafter.serving,
            seed=verification.plan.seed,
            scratch=str(scratch),
        )
        engine = RolloutEngine(spec)
        try:
            await engine.start()
            return await verify_engine(engine, verification, laws, scratch, console)
        finally:
            await engine.shutdown()


def _laws(verification: Verification) -> Laws:
    """The engine's weights, rounded as it rounds them, then computed with in float32."""
    from transformers import AutoModelForCausalLM

    from cotrain.policy.log_probs import ResponseLogProbs

    dtype = verification.plan.dtype
    model = AutoModelForCausalLM.from_pretrained(verification.model, dtype=getattr(torch, dtype)).float().eval()
    try:
        ResponseLogProbs(model, 1.0, torch.float32).check_head()
    except ValueError as error:
        raise ValueError(f"--law: {error}, or compare with text without speculation: --law none") from error
    return checks.target_laws(model, verification.draft_vocabulary, dtype)


async def verify_engine(
    engine: "RolloutEngine", verification: Verification, laws: Laws | None, scratch: Path, console: TextIO
) -> Outcome:
    """Greedy checks once, sampled ones as often as asked; each repeat is judged together with the greedy checks."""
    plan = verification.plan
    total = plan.num_greedy_tokens + plan.num_sampled_tokens * verification.repeats
    progress = checks.Progress(total, lambda line: print(line, file=console))
    state = verification.drafter.state_for_serving()
    drafters = [
        write_payload(tensors, scratch / f"{name}.safetensors", getattr(torch, plan.dtype))
        for name, tensors in (("drafter", state), ("other", checks.perturbed(state, plan.seed)))
    ]
    found = await checks.greedy_checks(engine, plan, drafters, progress)
    verdicts = []
    for repeat in range(verification.repeats):
        rng = np.random.default_rng([plan.seed, repeat])
        if laws is None:
            sampled = await checks.two_sample_checks(engine, plan, rng, progress, repeat)
        else:
            sampled = await checks.sampled_checks(engine, plan, laws, drafters, rng, progress, repeat)
        verdicts.append(judge([*found, *sampled], verification.alpha))
        if verification.repeats > 1:
            print(f"repeat {repeat + 1}/{verification.repeats}: {verdicts[-1]}", file=console)
    return Outcome(tuple(verdicts), verification.power)
