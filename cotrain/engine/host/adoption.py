"""Decides which engines of a host are adopted, that is, draft with the drafter that the trainer beside the host trains.

All other engines start exactly as the host asked, and one line of the log says why and what to do about it.
"""

import copy
import functools
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cotrain.engine.host.breaker import log
from cotrain.engine.interface import SIDECAR, SIDECAR_OF_RUNNER, SIDECAR_VERSIONS, moved_in, wrap
from cotrain.transport.spool import VARIABLE, Settings, Spool, SpoolError, State, Verdict, remove_leftovers, write_json

CHECK_VARIABLE = "COTRAIN_SIDECAR_CHECK"  # if it is set, the process that makes an engine ends before it loads a model
MARK = "cotrain_adopted"  # attribute of an adopted engine's SchedulerConfig, which its core and workers get too

HOST_HAS_SET = {
    "speculative_config": "an engine has one proposer: leave it out",
    "logits_processors": "vLLM refuses them beside speculation",
}
"""Arguments of vLLM that keep an engine from being adopted when the host sets them, and why."""

DIVIDED_OTHERWISE = (
    "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "nnodes",
)  # fmt: skip


class NotAdopted(Exception):
    """An engine is not adopted. The message says why, and what would change that."""


def configured(original: Callable[..., Any], args: Any, *rest: Any, **options: Any) -> Any:
    """Return the VllmConfig of an engine: with our drafter if the engine is adopted, else exactly what vLLM makes of `args`.

    original: EngineArgs.create_engine_config. Raises what it raises for the host's own arguments, and SystemExit in a check.
    """
    if not os.environ.get(VARIABLE):  # the host has unset it since the plugin was loaded
        return original(args, *rest, **options)
    try:
        ours = copy.copy(args)  # so that a second call for the same engine gives the same result
        spool = Spool(os.environ[VARIABLE])
        remove_leftovers(spool.folder.parent, Path("/dev/shm"))
        settings = check_arguments(args, spool)
        loading = {"draft_load_config": {"load_format": "auto"}}  # hosts such as verl load their policy as "dummy"
        ours.speculative_config = settings.speculative_config | loading
        config = original(ours, *rest, **options)
        check_config(config)
        setattr(config.scheduler_config, MARK, True)
        config.scheduler_config.get_scheduler_cls()  # runs the plugin's hook: if it fails, the engine is not adopted
        _claim(spool, config)
        log.info("cotrain: this engine of %s drafts with what the trainer of %s trains", args.model, spool.folder)
        _tell(args.model, None)
        return config
    except Exception as error:
        is_known = isinstance(error, NotAdopted | SpoolError)
        reason = str(error) if is_known else f"{type(error).__name__}: {error}"
        log.warning("cotrain: this engine of %s gets no drafter: %s", args.model, reason, exc_info=not is_known)
        _tell(args.model, reason)
    return original(args, *rest, **options)


def _tell(model: str, reason: str | None) -> None:
    """Write the verdict on an engine into the spool. In a check of the host's command, this also ends the process."""
    with suppress(OSError, ValueError):
        Spool(os.environ[VARIABLE]).add_verdict(Verdict(model, os.getpid(), reason))
    if CHECK_VARIABLE in os.environ:
        raise SystemExit("cotrain: the check ends here, before a model is loaded")


def check_arguments(args: Any, spool: Spool) -> Settings:
    """Check vLLM's EngineArgs before an engine is configured. Returns the settings; raises NotAdopted or SpoolError."""
    import vllm

    settings = spool.settings()
    if args.model != settings.model and os.path.realpath(args.model) != os.path.realpath(settings.model_path):
        raise NotAdopted(f"the trainer's drafter is for {settings.model}")
    if not spool.is_alive():
        raise NotAdopted(f"the trainer of {spool.folder} shows no sign of life: start it again")
    if (args.worker_extension_cls or "").startswith("cotrain."):
        raise NotAdopted("a run of cotrain has started it, which trains its drafter itself")
    for name, reason in HOST_HAS_SET.items():
        if getattr(args, name):
            raise NotAdopted(f"the host has set {name}, and {reason}")
    if not vllm.__version__.startswith(tuple(f"{known}." for known in SIDECAR_VERSIONS)):
        known = f"{SIDECAR_VERSIONS[0]} to {SIDECAR_VERSIONS[-1]}"
        raise NotAdopted(f"this is vLLM {vllm.__version__}: install one of {known}")
    _check_hooks(SIDECAR)
    return settings


def _check_hooks(table: dict[str, str]) -> None:
    import vllm

    if moved := moved_in(Path(vllm.__file__).parents[1], table):
        raise NotAdopted(f"this vLLM {vllm.__version__} is not the one that was published: {'; '.join(moved)}")


def check_config(vllm_config: Any) -> None:
    """Check the VllmConfig that was made with our drafter. Raises NotAdopted."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    _check_hooks(SIDECAR_OF_RUNNER[vllm_config.use_v2_model_runner])
    if model.runner_type != "generate":
        raise NotAdopted(f"it does not generate text but is for {model.runner_type}")
    for name in DIVIDED_OTHERWISE:
        if (number := getattr(parallel, name)) != 1:
            raise NotAdopted(f"{name} is {number}: an engine may be divided by tensor_parallel_size alone")
    if parallel.tensor_parallel_size > 1 and (backend := parallel.distributed_executor_backend) != "mp":
        raise NotAdopted(
            f"its ranks are started by {backend}: set distributed_executor_backend to mp, vLLM's own processes"
        )


def _claim(spool: Spool, config: Any) -> None:
    """Show that an engine lives, so that its first drafter stays until it is loaded. Raises NotAdopted if the trainer has ended."""
    weakref.finalize(config, spool.join(config.instance_id).close)
    if not spool.is_alive():
        raise NotAdopted(f"the trainer of {spool.folder} has just ended: start it again")


def scheduler_class(original: Callable[..., Any], scheduler_config: Any) -> Any:
    """Return the host's scheduler class, with ours mixed in for an adopted engine. `configured` tries this before it adopts."""
    host = original(scheduler_config)
    if not getattr(scheduler_config, MARK, False):
        return host
    from cotrain.engine.host.scheduling import HostScheduling

    return type(host.__name__, (HostScheduling, host), {"cotrain_spool": Spool(os.environ[VARIABLE])})


def init_device(original: Callable[..., Any], wrapper: Any) -> Any:
    """Attach to a worker of an adopted engine, once it has loaded its model."""
    if getattr(wrapper.vllm_config.scheduler_config, MARK, False):
        wrap(wrapper.worker, "load_model", functools.partial(_load_and_attach, wrapper.worker))
    return original(wrapper)


def _load_and_attach(worker: Any, load_model: Callable[..., None], *args: Any, **options: Any) -> None:
    """Load the model and attach the sidecar. If it cannot attach, the engine drafts nothing and its state.json says why."""
    load_model(*args, **options)
    instance, spool = worker.vllm_config.instance_id, Spool(os.environ.get(VARIABLE, ""))
    try:
        from cotrain.engine.host.worker import WorkerSidecar
        from cotrain.engine.served import on_all_ranks

        sidecar = on_all_ranks(lambda: WorkerSidecar(worker, spool.join(instance), spool.settings()))
        on_all_ranks(sidecar.begin)
        sidecar.hook_in()
    except Exception as error:
        log.exception("cotrain: the sidecar cannot attach, and the engine works without a drafter")
        with suppress(OSError, ValueError):
            spool.check()
            if worker.rank == 0:
                write_json(
                    spool.engine(instance).state,
                    State(os.getpid(), f"{type(error.__cause__ or error).__name__}: {error}"),
                )
