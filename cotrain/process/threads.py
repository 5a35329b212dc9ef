"""The one place that decides how many OpenMP threads each role gets, and which OpenMP runtime it uses.

Engine and learners share cores and take turns. With libgomp, workers that wait for their next parallel region spin,
and on a small machine they spin against the process whose turn it is: SmolLM2-135M with speculation falls from 45 to
5-10 tokens/s. Intel's runtime (it comes with vLLM's CPU build) with KMP_BLOCKTIME=1 ms lets them sleep.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def openmp_library() -> str | None:
    paths = [Path(prefix) / "lib" / "libiomp5.so" for prefix in (sys.prefix, sys.base_prefix)]
    return next((str(path) for path in paths if path.exists()), None)


def openmp_environment(num_threads: int | None = None) -> dict[str, str]:
    """Environment of a process that computes on `num_threads` cores (None: all), and whose threads sleep while others compute."""
    environment = {
        "OMP_NUM_THREADS": str(num_threads or num_cores()),
        "MALLOC_ARENA_MAX": "2",  # tensors of many sizes fragment glibc's default of eight arenas per core
    }
    library = openmp_library()
    if library is None:
        return environment | {"OMP_WAIT_POLICY": "PASSIVE"}
    preload = [p for p in os.environ.get("LD_PRELOAD", "").split(":") if p and p != library]
    # OMP_WAIT_POLICY would override KMP_BLOCKTIME.
    return environment | {"LD_PRELOAD": ":".join([library, *preload]), "KMP_BLOCKTIME": "1"}


def engine_environment(num_threads: int | None = None, num_ranks: int = 1) -> dict[str, str]:
    """Environment of a vLLM engine and all the processes it starts; its tensor-parallel ranks share the threads."""
    num_threads = num_threads or num_cores()
    environment = openmp_environment(max(1, num_threads // num_ranks))
    environment |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin the engine to one core of two
        # GiB. Unset, vLLM takes 92 % of the machine's memory. The engine argument kv_cache_memory_bytes wins over it.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # a policy update on a CPU spends a fifth of its time on single pages
        "TOKENIZERS_PARALLELISM": "false",
    }
    return environment


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def low_priority(by: int) -> Iterator[None]:
    """Lower the priority of this process on the CPU by so much, and in the body that of its session, if it has one to itself.

    Linux shares the CPU among sessions first (autogroups, see sched(7)). There the priority of a process counts within its session alone.
    """
    priority, group, before = os.nice(by), Path("/proc/self/autogroup"), None
    with suppress(OSError):  # this system has no such groups
        if _has_session() and (share := group.read_text().split()):  # empty where a cgroup has its own share of the CPU
            before = share[-1]
            group.write_text(str(priority))
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                group.write_text(before)


def _has_session() -> bool:
    """Does this process lead its session, or is it in the foreground of the session's terminal?"""
    if os.getsid(0) == os.getpid():
        return True
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False  # its input is no terminal
