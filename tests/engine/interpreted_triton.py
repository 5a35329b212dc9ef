"""vLLM's model runner V2 without a GPU: its Triton kernels run in Triton's interpreter, which takes a second a step.

The CPU build of vLLM has the runner, but no Triton that compiles for a CPU.
"""

from types import SimpleNamespace
from typing import Any

INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of a process that calls `interpret`."""


def interpret() -> None:
    """Let vLLM, which has not been imported yet, take the interpreter for a Triton that compiles for a CPU."""
    import numpy as np
    import triton.backends
    import triton.language as tl
    import triton.language.extra.libdevice as libdevice
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
    store = InterpreterBuilder.create_masked_store

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        mask.data = mask.data.astype(bool)  # the mask of gumbel_sample has become one of integers
        return store(self, pointers, value, mask, policy)

    InterpreterBuilder.create_masked_store = create_masked_store

    def log1p(x: Any) -> Any:
        with np.errstate(all="ignore"):
            return tl.core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p  # without a GPU there is only its declaration
