"""The plugin that vLLM loads in each process of an engine, in the environment that cotrain is installed in.

Without the environment variable it does nothing, and imports nothing. With it, three functions of vLLM are wrapped that
run before an engine is configured, its scheduler made, its model loaded. None of this may ever end the host.
"""

import functools
import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Wrap vLLM's functions, once a process. Raises nothing: vLLM would hand that on to the host."""
    if not os.environ.get("COTRAIN_SIDECAR"):
        return
    try:
        _wrap_all()
    except Exception:
        from cotrain.sidecar.breaker import log

        log.exception("cotrain: this vLLM cannot be hooked into; its engines start as the host asked for")


def _wrap_all() -> None:
    from vllm.config.scheduler import SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from cotrain.sidecar.adoption import configured

    _wrap(EngineArgs, "create_engine_config", configured)
    _wrap(SchedulerConfig, "get_scheduler_cls", _scheduler_class)
    # Workers of their own load this plugin in init_worker, so what comes after that is wrapped.
    _wrap(WorkerWrapperBase, "init_device", _init_device)


def _wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
    """Let `hook` stand in for a method; it gets the method as its first argument."""
    original = getattr(owner, name)
    if not hasattr(original, "cotrain_hook"):
        wrapped: Any = functools.wraps(original)(lambda *args, **options: hook(original, *args, **options))
        wrapped.cotrain_hook = hook
        setattr(owner, name, wrapped)


def _scheduler_class(original: Callable[..., Any], scheduler_config: Any) -> Any:
    """The host's scheduler, in an adopted engine with ours mixed in."""
    from cotrain.sidecar.adoption import MARK
    from cotrain.sidecar.breaker import log

    host = original(scheduler_config)
    if not getattr(scheduler_config, MARK, False):
        return host
    try:
        from cotrain.sidecar.scheduling import HostScheduling
        from cotrain.sidecar.spool import Spool

        return type(host.__name__, (HostScheduling, host), {"cotrain_spool": Spool(os.environ["COTRAIN_SIDECAR"])})
    except Exception:
        log.exception("cotrain: the scheduler cannot be watched; the engine does not speculate")
        return _without_drafts(host)


def _without_drafts(host: Any) -> Any:
    def schedule(self: Any, *args: Any, **options: Any) -> Any:
        self.dynamic_sd_lookup = [0] * (self.scheduler_config.max_num_seqs + 1)
        return host.schedule(self, *args, **options)

    return type(host.__name__, (host,), {"schedule": schedule, "update_draft_token_ids": lambda self, drafts: None})


def _init_device(original: Callable[..., Any], wrapper: Any) -> Any:
    """Attach to a worker before its model is loaded."""
    from cotrain.sidecar.adoption import is_adopted
    from cotrain.sidecar.breaker import log

    if is_adopted(wrapper.vllm_config):
        try:
            from cotrain.sidecar.spool import Spool
            from cotrain.sidecar.worker import attach_to

            attach_to(wrapper.worker, Spool(os.environ["COTRAIN_SIDECAR"]))
        except Exception:
            log.exception("cotrain: the worker cannot be watched; the engine does not speculate")
    return original(wrapper)
