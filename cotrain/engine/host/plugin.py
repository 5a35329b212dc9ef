"""The plugin that vLLM loads in each process of an engine if cotrain is installed in the engine's environment.

Without the variable COTRAIN_SIDECAR it does nothing and imports nothing. With it, it wraps three functions of vLLM, which run
when an engine is configured, before its scheduler is made and before its model is loaded. It must never end the host.
"""

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def register() -> None:
    """Wrap vLLM's functions, once in each process. It raises nothing, since vLLM would pass an error on to the host."""
    if not os.environ.get("COTRAIN_SIDECAR"):
        return
    try:
        _wrap_all()
    except Exception:
        from cotrain.engine.host.breaker import log

        log.exception("cotrain: this vLLM cannot be hooked into; its engines start as the host asked")


def _wrap_all() -> None:
    from vllm.config.scheduler import SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from cotrain.engine.host.adoption import configured
    from cotrain.engine.interface import wrap

    wrap(EngineArgs, "create_engine_config", configured)
    wrap(SchedulerConfig, "get_scheduler_cls", _scheduler_class)
    # A worker in a process of its own loads this plugin in init_worker, so only what runs after that can be wrapped.
    wrap(WorkerWrapperBase, "init_device", _init_device)


def _scheduler_class(original: Callable[..., Any], scheduler_config: Any) -> Any:
    """Return the host's scheduler class, with ours mixed in for an adopted engine. `configured` tries this before it adopts."""
    from cotrain.engine.host.adoption import MARK

    host = original(scheduler_config)
    if not getattr(scheduler_config, MARK, False):
        return host
    from cotrain.engine.host.scheduling import HostScheduling
    from cotrain.transport.spool import Spool

    return type(host.__name__, (HostScheduling, host), {"cotrain_spool": Spool(os.environ["COTRAIN_SIDECAR"])})


def _init_device(original: Callable[..., Any], wrapper: Any) -> Any:
    """Attach to a worker of an adopted engine, once it has loaded its model."""
    from cotrain.engine.host.adoption import MARK
    from cotrain.engine.interface import wrap

    worker = wrapper.worker
    if getattr(wrapper.vllm_config.scheduler_config, MARK, False):
        wrap(worker, "load_model", functools.partial(_load_and_attach, worker))
    return original(wrapper)


def _load_and_attach(worker: Any, load_model: Callable[..., None], *args: Any, **options: Any) -> None:
    """Load the model and attach the sidecar. If it cannot attach, the engine drafts nothing and its facts.json says why."""
    from cotrain.engine.host.adoption import MARK
    from cotrain.engine.host.breaker import log
    from cotrain.transport.spool import Spool, write_json

    load_model(*args, **options)
    config, spool = worker.vllm_config, Spool(os.environ["COTRAIN_SIDECAR"])
    host = getattr(config.scheduler_config, MARK)
    try:
        from cotrain.engine.host.worker import WorkerSidecar

        settings = spool.settings()
        engine = spool.join(config.instance_id, host, alone=not settings.replicas)
        WorkerSidecar(worker, engine, settings).hook_in()
    except Exception as error:
        log.exception("cotrain: the sidecar cannot attach, and the engine works without a drafter")
        with suppress(OSError, ValueError):
            spool.check()
            facts = {"attached": False, "reason": f"{type(error).__name__}: {error}", "host": host, "pid": os.getpid()}
            write_json(spool.engine(config.instance_id).facts, facts)
