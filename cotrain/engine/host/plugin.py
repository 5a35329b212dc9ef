"""The plugin that vLLM loads in each process of an engine if cotrain is installed in the engine's environment.

Without the variable COTRAIN_SIDECAR it does nothing and imports nothing. With it, it wraps three functions of vLLM, which run
when an engine is configured, before its scheduler is made and before its model is loaded. It must never end the host.
"""

import os


def register() -> None:
    """Wrap vLLM's functions, once in each process. It raises nothing, since vLLM would pass an error on to the host."""
    if not os.environ.get("COTRAIN_SIDECAR"):
        return
    try:
        from vllm.config.scheduler import SchedulerConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from cotrain.engine.host import adoption
        from cotrain.engine.interface import wrap

        wrap(EngineArgs, "create_engine_config", adoption.configured)
        wrap(SchedulerConfig, "get_scheduler_cls", adoption.scheduler_class)
        # A worker in a process of its own loads this plugin in init_worker, so only what runs after that can be wrapped.
        wrap(WorkerWrapperBase, "init_device", adoption.init_device)
    except Exception:
        from cotrain.engine.host.breaker import log

        log.exception("cotrain: this vLLM cannot be hooked into; its engines start as the host asked")
