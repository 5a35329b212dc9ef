"""The command line of a run, and what can be checked before any model loads. All problems are reported at once.

Each check raises ValueError or yields its problems, each with the field and the fix.
"""

import argparse
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.load import INIT, load_config, to_toml
from cotrain.config.lossless_guard import environment_problems, model_runner_problems
from cotrain.config.schema import DatasetTask, DrafterConfig, LoraConfig, PolicyConfig, ReasoningGymTask, RunConfig
from cotrain.config.surroundings import cache_problems, nearest
from cotrain.models.capability import drafter_problems
from cotrain.models.loading import config_folder, has_to_be_fetched, native_head, resolve_model, serving_problems
from cotrain.process.cluster import engine_device, place
from cotrain.process.scratch import SHARED_MEMORY
from cotrain.run.mlflow_store import URI_VARIABLE, check_uri, tracking_uri
from cotrain.run.provenance import machine
from cotrain.run.run_dir import resume_arguments
from cotrain.tasks.base import build_task
from cotrain.tasks.datasets import is_file_or_folder
from cotrain.tasks.rewards import load_reward
from drafters.files import read_config, safetensors_header, text_fields, weight_files
from pipelines.help import CommandParser
from pipelines.models import facts
from pipelines.plan import BYTES, GIB, plan, policy_on_meta

TRAINING_BYTES = 12  # bytes a checkpoint keeps per policy parameter: float32 weight and two AdamW moments
POLICY_UPDATES_HELD = 2
"""Maximum number of policy updates in shared memory: the served one, for taking back a failed update, and the new one."""


def read_command_line(command: str, arguments: Sequence[str]) -> tuple[RunConfig, bool] | None:
    """Read and check the configuration given to `cotrain COMMAND`. Returns it, and whether it continues a run.

    Returns None when --dry-run has printed it and found no problem. Raises ConfigError listing all problems.
    """
    train = command == "train"
    usage = f"cotrain {command} CONFIG... [key=value...] [--dry-run] [--resume NAME]"
    usage += " [--nodes N --gpus-per-node M]" * train
    parser = CommandParser(command, RunConfig if train else None, usage=usage)
    parser.add_argument("config", nargs="*", metavar="CONFIG", help="TOML files, and overrides section.field=value")
    parser.add_argument("--dry-run", action="store_true", help="check, print the whole configuration as TOML, and stop")
    parser.add_argument("--resume", metavar="NAME", help="continue this run; CONFIG and overrides come after its own")
    if train:
        text = "with --dry-run: also print what would run where on N equal nodes, and its memory"
        parser.add_argument("--nodes", type=int, metavar="N", help=text)
        parser.add_argument("--gpus-per-node", type=int, metavar="M", help="GPUs of each of these nodes")
    parsed = parser.parse_intermixed_args(arguments, argparse.Namespace(nodes=None, gpus_per_node=None))
    nodes, gpus, resume = parsed.nodes, parsed.gpus_per_node, parsed.resume is not None
    if (nodes, gpus) != (None, None) and not (parsed.dry_run and (nodes or 0) >= 1 and gpus is not None and gpus >= 0):
        line = "--nodes, --gpus-per-node: they describe a cluster of 1 node or more; give both beside --dry-run, or neither"
        raise ConfigError([line])
    if not parsed.config and not resume:
        example = f"for example configs/smoke.toml; see cotrain {command} --help"
        raise ConfigError([f"CONFIG: no configuration given, {example}"])
    # Overrides may contain slashes and dots, and file names may contain "=", so whatever exists as a file is one.
    overrides = [text for text in parsed.config if "=" in text and not Path(text).is_file()]
    files = [text for text in parsed.config if text not in overrides]
    # A run's own configuration has what `cotrain init` sets.
    config = load_config(files, overrides if train or resume else [*INIT, *overrides], parsed.resume)
    if parsed.dry_run:
        print(to_toml(config), flush=True)
        name = config.policy.model
        with suppress(ValueError):  # the problems below say it too
            for fact in islice(facts(name, config_folder(name)), 1 if has_to_be_fetched(name) else 2):
                print(f"# {fact}")
    problems = find_problems(config, resume, command, quick=parsed.dry_run, on_this_machine=nodes is None)
    if nodes is not None:
        problems += _problems(lambda: print(plan(config, nodes, gpus)))
    if problems:
        raise ConfigError(problems)
    if not parsed.dry_run:
        return config, resume
    print("# no problem found; what has to be downloaded or built, and drafter.init, are checked when the run starts")
    return None


def find_problems(
    config: RunConfig, resume: bool = False, command: str = "train", quick: bool = False, on_this_machine: bool = True
) -> list[str]:
    """What is wrong with a run before its folder is made, each problem with the field and the fix.

    A bundled or hub model, a dataset and a drafter of a registry are fetched here, once. Neither disk space nor the task are checked
    for `cotrain evaluate`, which needs [validation] only.
    quick: only what can be checked without a download or a conversion, and without loading weights (for --dry-run).
    on_this_machine: the run is to start here, so check that the devices and the room it needs are here too.
    """
    if on_this_machine and (problems := cache_problems()):
        return problems
    problems, trains, drafter = [], command != "evaluate", config.drafter
    if not resume and (config.run_root / config.name).exists():
        fix = f"continue it with {resume_arguments(config.run_root, config.name)}, or choose another name=..."
        problems.append(f"name: run {config.name!r} is already in {config.run_root}; {fix}")
    problems += _init_problems(config) if command == "init" else ()
    if config.tracking.uri or os.environ.get(URI_VARIABLE):  # _check_run_root covers the default in the run root
        problems += _problems(check_uri, tracking_uri(config))
    problems += _problems(_check_vllm, config)
    if on_this_machine:
        problems += _problems(_check_device, config) + _problems(_check_run_root, config)
    problems += _reward_problems(config) if trains else []
    model = None
    try:
        if not (quick and has_to_be_fetched(config.policy.model)):
            model = resolve_model(config.policy.model)
    except ValueError as error:
        problems.append(str(error))
    wanted = "rollout.prompts_per_step", config.rollout.prompts_per_step
    if trains:
        problems += _problems(_check_data, config, *wanted, model, quick)
    if config.validation is not None and (held_out := config.held_out) is not None:
        wanted = "validation.num_prompts", config.validation.num_prompts
        found = _problems(_check_data, held_out, *wanted, model, quick)
        found += _reward_problems(held_out)
        if held_out.task.num_scorers > 1:
            found.append("task.num_scorers: a single process scores held-out responses; leave it out")
        if config.validation.samples_per_prompt > 1 and not config.validation.temperature:
            found.append("validation.samples_per_prompt: all are the same at validation.temperature = 0; raise that")
        problems += [re.sub(r"\btask\.", "validation.task.", problem) for problem in found]
    if model is None:
        return problems
    problems += _problems(_check_model, config, model)
    if config.policy.lora is not None and config.policy.train:
        problems += _problems(_check_adapters, config.policy, config.policy.lora, model)
    if trains and config.policy.train and on_this_machine:
        problems += _problems(_check_space, config, model)
    if drafter is not None:
        problems += _problems(_check_drafter_shape, config, drafter, model)
        if not (resume or quick) and (drafter.init or native_head(model)):
            problems += _problems(_check_drafter_init, config, drafter, model)
    return problems


def _problems(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """What a check yields or raises."""
    found: list[str] = []
    try:
        result = check(*arguments)
        found += result if isinstance(result, Iterator) else ()
    except ValueError as error:
        found.append(str(error))
    return found


def _init_problems(config: RunConfig) -> Iterator[str]:
    if config.policy.train:
        yield "policy.train: `cotrain init` trains no policy; leave it out, or use `cotrain train`"
    if config.drafter is None or not config.drafter.train:
        yield "drafter: `cotrain init` trains a drafter; leave out drafter=none and drafter.train=false"
    elif config.drafter.train_every >= config.steps:
        what = (
            f"{config.drafter.train_every} is not below steps = {config.steps}, so that nothing trained would be served"
        )
        yield f"drafter.train_every: {what}; lower it, or raise steps"


def _reward_problems(config: RunConfig) -> list[str]:
    names = config.task.reward if isinstance(config.task, DatasetTask) else ()
    return [problem for name in names for problem in _problems(load_reward, name)]


def _check_vllm(config: RunConfig) -> Iterator[str]:
    """vLLM is installed, knows every key of rollout.vllm, and no environment variable makes its speculation lossy."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ValueError("vLLM is not installed; run `make setup`")
    kind = config.drafter.model.type if config.drafter is not None else None
    has_history = config.rollout.history is not None
    problems = [*model_runner_problems(os.environ, engine_device() == "cpu", has_history, kind)]
    for name, message in [*problems, *(environment_problems(os.environ) if config.speculates else ())]:
        yield f"{name}: {message}"
    # The fields of its argument classes are read from the source, because importing it takes 5 s.
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text()
    known = re.findall(r"^    (\w+):", source, re.MULTILINE)
    for key in (key for key in config.rollout.vllm if key not in known):
        yield f"rollout.vllm.{key}: vLLM has no such engine argument{did_you_mean(key, known, 'rollout.vllm')}"


def _check_device(config: RunConfig) -> None:
    """This machine has a GPU if vLLM's build is for one, and as many as the run needs. Nodes of a cluster are not checked."""
    gpus = len(machine()["gpus"]) * (engine_device() == "cuda")
    if config.cluster.address is None:
        if engine_device() == "cuda" and not gpus:
            raise ValueError("vLLM is installed for GPUs, but there is none; run `make setup` again, for its CPU build")
        place(config, [gpus])


def _check_data(config: RunConfig, field: str, wanted: int, model: Path | None, quick: bool) -> None:
    """The data is there, has as many prompts as a field wants and, if the model is there, they can be encoded. quick: nothing is fetched."""
    data = config.task
    if quick and isinstance(data, DatasetTask) and not is_file_or_folder(data.path):
        return
    task = build_task(data, config.seed, model, config.rollout.max_prompt_tokens)
    if wanted > len(task):
        more = "raise task.size" if isinstance(data, ReasoningGymTask) else "add rows to task.path"
        few = f"{wanted} is more than the {len(task)} prompts of the task"
        raise ValueError(f"{field}: {few}; lower it, or {more}")


def _check_run_root(config: RunConfig) -> None:
    root = nearest(config.run_root)
    try:
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        why = f"{root} is no folder that can be written ({error.strerror})"
        raise ValueError(f"run_root: {why}; set run_root=...") from None


def _check_model(config: RunConfig, model: Path) -> Iterator[str]:
    """Prompt, response and draft tokens fit the model's positions, and vLLM can serve it here."""
    longest, rollout = text_fields(read_config(model)).get("max_position_embeddings"), config.rollout
    yield from serving_problems(model, engine_device() == "cpu", rollout.dtype, "rollout.dtype", rollout.vllm)
    positions = rollout.positions(config.drafter.model.type if config.drafter else None)
    if longest is not None and positions > longest:
        yield (
            f"rollout.max_new_tokens: max_prompt_tokens + max_new_tokens = {rollout.max_model_len}, with "
            f"{positions - rollout.max_model_len} spare positions for num_speculative_tokens, is above the "
            f"{longest} of {config.policy.model}; lower one of them"
        )


def _check_adapters(policy: PolicyConfig, lora: LoraConfig, model: Path) -> None:
    """The model has the modules that get adapters."""
    from cotrain.policy.adapters import add_adapters

    add_adapters(policy_on_meta(model), lora, policy.model, 0)


def _check_space(config: RunConfig, model: Path) -> Iterator[str]:
    """The run root holds the checkpoints, and shared memory the policy updates."""
    tensors = (tensor for path in weight_files(model) for tensor in safetensors_header(path).values())
    parameters = sum(prod(tensor["shape"]) for tensor in tensors)
    copies = config.checkpoint.keep_last + 1  # the next checkpoint is written before the oldest is deleted
    if config.policy.lora is None and (short := _shortage(config.run_root, copies * parameters * TRAINING_BYTES)):
        fix = "lower checkpoint.keep_last, or set run_root to a larger disk"
        yield f"run_root: {copies} checkpoints of {config.policy.model} take {short}; {fix}"
    updates = POLICY_UPDATES_HELD * parameters * BYTES[config.rollout.dtype]
    if os.access(SHARED_MEMORY, os.W_OK) and (short := _shortage(SHARED_MEMORY, updates)):
        what = f"policy updates take {short} (for the one that is served and the one that is written)"
        yield f"policy.model: {what}; enlarge it (docker run --shm-size)"


def _shortage(folder: Path, needed: int) -> str | None:
    free = shutil.disk_usage(nearest(folder)).free
    return None if free >= needed else f"{needed / GIB:.1f} GiB, but {folder} has {free / GIB:.1f} free"


def _check_drafter_shape(config: RunConfig, drafter: DrafterConfig, model: Path) -> Iterator[str]:
    """A drafter of this kind and shape fits the target."""
    from drafters.build import kind_of

    kind, head = drafter.model.type, native_head(model)
    yield from drafter_problems(read_config(model), model, drafter.model, engine_device() == "cpu")
    if head is not None and (own := kind_of(head)) != kind:
        what = f'{config.policy.model} brings a drafter of its own, of type "{own}"'
        why = f'which beside one of type "{kind}" would go stale as the policy moves'
        yield f'drafter.model.type: {what}, {why}; set type = "{own}", which trains it'


def _check_drafter_init(config: RunConfig, drafter: DrafterConfig, model: Path) -> None:
    """The first drafter is whole, was made for this target, and has the shape that the configuration asks for."""
    from cotrain.run.registry import first_drafter
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    with tempfile.TemporaryDirectory() as scratch:
        folder = first_drafter(tracking_uri(config), drafter.init, model, Path(scratch) / "drafter")
        try:
            if folder is not None:
                positions = config.rollout.positions(drafter.model.type)
                load_drafter(folder, TargetSpec.from_pretrained(model), positions, drafter.model)
        except ValueError as error:
            raise ValueError(f"{'drafter.init' if drafter.init else 'policy.model'}: {error}") from error
