"""Memory of a process that trains a drafter on the CPU."""

import ctypes
import ctypes.util

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""

LARGE_BLOCK = 4 * 2**20
"""Blocks of this many bytes and more go back to the system when they are freed."""


def return_freed_blocks() -> bool:
    """Let freed tensors of 4 MiB and more leave the process. False where the C library has no such setting.

    glibc raises its limit to 32 MiB by itself. A drafter's step frees blocks of many sizes below that, between others
    that stay, so that a fifth of its peak memory was holes (benchmarks/drafter_memory.py: 3.2 instead of 2.6 GiB).
    Costs up to 5 % of the step's time in page faults. Tensors on a GPU are not concerned.
    """
    mallopt = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK) and mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)
    )
