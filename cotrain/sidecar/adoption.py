"""Which engines of a host are adopted: they draft with what the trainer beside them trains.

All others start exactly as the host asked for, and one line says why, and what to do about it.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cotrain.rollout.vllm.interface import SIDECAR, SIDECAR_OF_RUNNER, SIDECAR_VERSIONS, moved_in
from cotrain.sidecar.breaker import log
from cotrain.sidecar.spool import HOST_VARIABLE, VARIABLE, Settings, Spool, write_json

CHECK_VARIABLE = "COTRAIN_SIDECAR_CHECK"
"""With this variable, a host ends before its first engine loads a model; what became of the engine is in the spool."""
VERDICTS = "verdicts"
"""Folder of the spool with a JSON file {"model", "pid", "reason"} for each engine; reason is null where it was adopted."""

MARK = "cotrain_adopted"
"""Attribute of the SchedulerConfig of an adopted engine. It goes along to the engine core and the workers."""

HOST_HAS_SET = {
    "speculative_config": "an engine has one proposer: leave it out",
    "async_scheduling": "a preempted request that speculates would read memory that is not its own: leave it out",
    "logits_processors": "vLLM refuses them beside speculation",
    "enable_lora": "the drafter learns from one set of weights: merge the adapter",
    "quantization": "the drafter needs the plain weights of the output head",
    "quantization_config": "the drafter needs the plain weights of the output head",
}
"""Arguments that keep an engine from being adopted, and why."""


class NotAdopted(Exception):
    """Why an engine is not adopted, with what would change that."""


def configured(original: Callable[..., Any], args: Any, *rest: Any, **options: Any) -> Any:
    """The VllmConfig of an engine: with our drafter where it is adopted, and else just what vLLM makes of `args`.

    original: EngineArgs.create_engine_config. Raises only what that raises for the host's own arguments.
    """
    if not os.environ.get(VARIABLE):  # the host has taken it away since the plugin was loaded
        return original(args, *rest, **options)
    host_args = dict(vars(args))
    try:
        spool = Spool(os.environ[VARIABLE])
        settings = check_arguments(args, spool)
        args.speculative_config, args.async_scheduling = dict(settings.speculative_config), False
        config = original(args, *rest, **options)
        check_config(config)
        _claim(spool, settings)
        setattr(config.scheduler_config, MARK, True)
        # A host that calls this again for the same engine gets the same answer.
        args.speculative_config, args.async_scheduling = None, host_args["async_scheduling"]
        log.info("cotrain: this engine of %s drafts with what the trainer of %s trains", args.model, spool.folder)
        _tell(host_args, None)
        return config
    except NotAdopted as reason:
        log.warning("cotrain: this engine of %s gets no drafter: %s", host_args.get("model"), reason)
        _tell(host_args, str(reason))
    except Exception as error:
        log.exception("cotrain: this engine gets no drafter, and starts as the host asked for")
        _tell(host_args, f"{type(error).__name__}: {error}")
    vars(args).clear()
    vars(args).update(host_args)
    return original(args, *rest, **options)


def _tell(host_args: dict[str, Any], reason: str | None) -> None:
    """Leave the verdict on an engine in the spool. Ends the process in a check of the host's command."""
    folder = Path(os.environ[VARIABLE]) / VERDICTS
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        verdict = {"model": host_args.get("model"), "pid": os.getpid(), "reason": reason}
        write_json(folder / f"{time.time_ns()}.json", verdict)
    if CHECK_VARIABLE in os.environ:
        raise SystemExit("cotrain: the check ends here, before a model is loaded")


def is_adopted(vllm_config: Any) -> bool:
    return getattr(vllm_config.scheduler_config, MARK, False)


def check_arguments(args: Any, spool: Spool) -> Settings:
    """Look at vLLM's EngineArgs before an engine is configured. Raises NotAdopted."""
    try:
        settings = spool.settings()
    except ValueError as error:
        raise NotAdopted(f"{error}; start the trainer first, and of this version of cotrain") from error
    if args.model != settings.model and os.path.realpath(args.model) != os.path.realpath(settings.model_path):
        raise NotAdopted(f"the trainer's drafter is for {settings.model}")
    if not spool.is_alive():
        raise NotAdopted(f"the trainer of {spool.folder} shows no sign of life: start it again")
    if (args.worker_extension_cls or "").startswith("cotrain."):
        raise NotAdopted("a run of cotrain has started it, which trains its drafter itself")
    for name, reason in HOST_HAS_SET.items():
        if getattr(args, name):
            raise NotAdopted(f"the host has set {name}, and {reason}")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(args, name) != 1:
            raise NotAdopted(f"{name} is {getattr(args, name)}: only an engine on a single device can be adopted")
    _check_vllm()
    return settings


def _check_vllm() -> None:
    import vllm

    if not vllm.__version__.startswith(tuple(f"{known}." for known in SIDECAR_VERSIONS)):
        known = f"{SIDECAR_VERSIONS[0]} to {SIDECAR_VERSIONS[-1]}"
        raise NotAdopted(f"this is vLLM {vllm.__version__}: install one of {known}")
    _check_hooks(SIDECAR)


def _check_hooks(table: dict[str, str]) -> None:
    import vllm

    if moved := moved_in(Path(vllm.__file__).parents[1], table):
        raise NotAdopted(f"this vLLM {vllm.__version__} is not the one that was published: {'; '.join(moved)}")


def check_config(vllm_config: Any) -> None:
    """Look at the VllmConfig that was made with our drafter. Raises NotAdopted."""
    model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.world_size
    _check_hooks(SIDECAR_OF_RUNNER[vllm_config.use_v2_model_runner])
    if model.quantization is not None:
        raise NotAdopted(f"its weights are quantized ({model.quantization}): take a checkpoint with plain weights")
    if model.runner_type != "generate":
        raise NotAdopted(f"it does not generate text but is for {model.runner_type}")
    if num_ranks != 1:
        raise NotAdopted(f"it has {num_ranks} ranks: only an engine on a single device can be adopted")


def _claim(spool: Spool, settings: Settings) -> None:
    """Let the spool belong to this host, unless it is for several. Raises NotAdopted."""
    host = os.environ.get(HOST_VARIABLE) or f"session {os.getsid(0)}"
    if not settings.replicas and (owner := spool.other_owner(host)):
        raise NotAdopted(
            f"process {owner['pid']} of another host uses {spool.folder}: start a trainer for this host too"
        )
