"""Memory of a process that trains a drafter on a CPU."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
LARGE_BLOCK = 4 * 2**20  # blocks of at least this many bytes go back to the system when they are freed


def return_freed_blocks() -> bool:
    """Return freed blocks of LARGE_BLOCK bytes or more to the system. False if the C library has no such setting.

    By itself, glibc raises this limit to up to 32 MiB. A drafter's step frees blocks of many sizes below that, between
    others that stay, and a fifth of its peak memory was holes (benchmarks/drafter_memory.py: 3.2 instead of 2.6 GiB).
    The setting costs up to 5 % of the step's time in page faults. It does not concern tensors on a GPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(p, LARGE_BLOCK) for p in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
