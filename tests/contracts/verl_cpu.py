"""A CPU as a platform of verl, by verl's own registry: VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu.

It has what the rollout engine and the sender of weights call; all of verl's own platforms are accelerators.
"""

from types import SimpleNamespace
from typing import Any

from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


def _nothing(*args: Any) -> None:
    """There is nothing to wait for and nothing to free."""


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(synchronize=_nothing, empty_cache=_nothing, ipc_collect=_nothing)
    synchronize = empty_cache = set_allocator_settings = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def is_ipc_supported(self) -> bool:
        return False
