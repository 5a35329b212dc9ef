"""What commands share that put one engine through something: their options, the checks before, and the start."""

import argparse
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrain.config.schema import DatasetTask, FeatureTapConfig, ReasoningGymTask, RolloutConfig
from cotrain.models.linear_attention import serving_problems
from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.scratch import scratch_folder
from cotrain.run.provenance import machine, package_versions
from drafters.base import Drafter, TargetSpec

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine

TaskConfig = ReasoningGymTask | DatasetTask
DEFAULT_TASK = ReasoningGymTask(type="reasoning_gym", name="chain_sum")
KV_BLOCK = 128
GIB = 2**30
BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4}


def add_engine_options(parser: argparse.ArgumentParser, command: str, tokens: int) -> None:
    """Options that mean the same in every command; tokens is the default length of a response."""
    parser.add_argument("--model", help="folder, hub id, or bundled:smollm2-135m-instruct")
    parser.add_argument("--drafter", help="checkpoint folder, models:/NAME@serving or native")
    parser.add_argument("--uri", default="sqlite:///runs/mlflow.db", help="MLflow of models:/... (default %(default)s)")
    parser.add_argument("--dtype", choices=tuple(BYTES_PER_VALUE), help="of the engine (default bfloat16)")
    parser.add_argument(
        "--tokens", type=at_least(2), default=tokens, help="length of every response (default %(default)s)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="of prompts and sampling (default %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=threads.num_cores(), help="OpenMP threads (all cores)")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"a new folder (default runs/{command}-<date>)")


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number that is not below `least`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number


def new_folder(out: Path | None, command: str) -> Path:
    """The folder for a command's results, which is made later. Raises ValueError when it holds something already."""
    out = out or Path("runs") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} is not empty; give a new folder")
    return out


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Date, machine, packages and options, for the head of a report."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "packages": package_versions(),
        "options": options,
    }


@dataclass(frozen=True)
class Subject:
    """A model, prompts and a drafter that an engine can serve together."""

    model: Path
    target: TargetSpec
    prompts: list[list[int]]
    positions: int
    """Of the longest prompt, its response and the draft tokens after it."""
    drafter: Drafter | None
    drafter_folder: Path | None

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(map(len, self.prompts))


def prepare_subject(
    args: argparse.Namespace, task: TaskConfig, num_prompts: int, spare: int, vllm: Mapping[str, Any], pulled: Path
) -> Subject:
    """Find the model, encode prompts of the task, load the drafter; args hold `add_engine_options`.

    spare: positions after a response, for draft tokens. A drafter of the registry is copied to the folder `pulled`.
    Raises ValueError naming the option and the fix.
    """
    try:
        model = resolve_model(args.model)
    except ValueError as error:
        raise ValueError(str(error).replace("policy.model:", "--model:")) from error
    if problems := serving_problems(model, not machine()["gpus"], args.dtype, "--dtype", dict(vllm)):
        raise ValueError("; ".join(problems))
    target = TargetSpec.from_pretrained(model)
    prompts = _prompts(task, args.seed, model, num_prompts)
    longest = max(map(len, prompts))
    positions = longest + args.tokens + spare
    if positions > target.max_position_embeddings:
        raise ValueError(
            f"--tokens: the longest prompt has {longest} tokens, with {args.tokens} more and {spare} for drafts it is "
            f"over the {target.max_position_embeddings} positions of {args.model}; lower --tokens"
        )
    folder, drafter = _drafter(args, model, target, positions, pulled) if args.drafter else (None, None)
    return Subject(model, target, prompts, positions, drafter, folder)


def _prompts(task_config: TaskConfig, seed: int, model: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from cotrain.tasks.base import build_task
    from cotrain.tasks.prompts import PromptEncoder

    task = build_task(task_config, seed)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(model), max_prompt_tokens=sys.maxsize)
    return [encoder.encode(task.prompt(index)) for index in range(min(count, len(task)))]


def _drafter(
    args: argparse.Namespace, model: Path, target: TargetSpec, positions: int, pulled: Path
) -> tuple[Path, Drafter]:
    from cotrain.run.registry import drafter_folder
    from drafters.build import load_drafter

    try:
        folder = drafter_folder(args.uri, args.drafter, model, pulled)
        return folder, load_drafter(folder, target, positions)
    except ValueError as error:
        raise ValueError(f"--drafter: {error}") from error


def roomy_rollout(subject: Subject, args: argparse.Namespace, batch: int, **fields: Any) -> RolloutConfig:
    """One prefill step for the largest batch, and room for all its KV: nothing waits and nothing is preempted.

    fields: more of RolloutConfig, such as draft_tokens; arguments for vLLM are added to those set here.
    """
    layers = subject.target.num_layers + 1  # the drafter's own
    values = 2 * layers * subject.target.num_key_value_heads * subject.target.head_dim
    kv_tokens = 2 * batch * ceil(subject.positions / KV_BLOCK) * KV_BLOCK
    vllm = {"max_num_seqs": batch, "max_num_batched_tokens": max(2048, batch * subject.positions)}
    given = {
        "max_prompt_tokens": subject.longest_prompt,
        "ignore_eos": True,
        **fields,
        "vllm": {**fields.get("vllm", {}), **vllm},
    }
    return RolloutConfig(
        prompts_per_step=batch,
        samples_per_prompt=1,
        max_new_tokens=args.tokens,
        dtype=args.dtype,
        kv_cache_gib=max(1, ceil(kv_tokens * values * BYTES_PER_VALUE[args.dtype] / GIB)),
        features=FeatureTapConfig(max_tokens_per_step=subject.positions),
        **given,
    )


@asynccontextmanager
async def one_engine(
    subject: Subject, rollout: RolloutConfig, args: argparse.Namespace, ngram: bool = False
) -> AsyncIterator["RolloutEngine"]:
    """A started engine that serves the subject; its spec.scratch is a folder in shared memory that goes with it.

    ngram: draft tokens are looked up in the request's own text, whatever drafter the subject has.
    """
    os.environ.update(threads.engine_environment(args.threads, rollout.kv_cache_gib))
    from cotrain.rollout.engine import RolloutEngine
    from cotrain.rollout.spec import EngineSpec

    drafted = subject.drafter is not None and not ngram
    with scratch_folder("engine") as scratch:
        spec = EngineSpec(
            rollout=rollout,
            model_path=str(subject.model),
            drafter_folder=str(subject.drafter_folder) if drafted else None,
            serving=subject.drafter.serving if subject.drafter is not None and drafted else None,
            seed=args.seed,
            scratch=str(scratch),
            speculation="ngram" if ngram else "drafter",
        )
        engine = RolloutEngine(spec)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.shutdown()
