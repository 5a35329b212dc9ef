"""vLLM's asynchronous scheduling on a CPU: what stands for streams and events of CUDA, since a CPU computes in order."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch


class InOrder:
    """A stream or an event of a device on which each call has ended when it returns."""

    def __init__(self, *args: Any, **options: Any):
        pass

    def record(self, *args: Any) -> None:
        pass

    wait_stream = synchronize = record


@contextmanager
def scheduling_is_asynchronous() -> Iterator[None]:
    """Let vLLM decide about asynchronous scheduling on a CPU as it does on a GPU, in this process and in what it forks."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def keep_scheduling(config: Any) -> None:
        decided = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = decided

    with (
        patch.object(platform, "check_and_update_config", staticmethod(keep_scheduling)),
        patch.multiple(
            torch.cuda, Event=InOrder, Stream=InOrder, current_stream=InOrder, stream=lambda stream: nullcontext()
        ),
    ):
        yield
