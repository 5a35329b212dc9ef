"""Environment of engines and learners: what is set, and that the OpenMP runtime asked for is the one in use."""

import os
import subprocess
import sys

import pytest

from cotrain.process import threads

needs_intel_openmp = pytest.mark.skipif(
    threads.openmp_library() is None, reason="libiomp5.so comes with vLLM's CPU build"
)


@needs_intel_openmp
def test_a_process_runs_on_the_runtime_that_lets_workers_sleep():
    code = (
        "import torch; print(torch.get_num_threads(), *[l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l])"
    )
    environment = os.environ | threads.openmp_environment(2)
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    num_threads, *libraries = out.stdout.split()
    assert num_threads == "2"
    assert threads.openmp_library() in libraries
    assert environment["KMP_BLOCKTIME"] == "1"
    assert "OMP_WAIT_POLICY" not in threads.openmp_environment(2)


@needs_intel_openmp
def test_what_was_preloaded_stays_preloaded(monkeypatch):
    library = threads.openmp_library()
    monkeypatch.setenv("LD_PRELOAD", f"/opt/libtcmalloc.so:{library}")
    assert threads.openmp_environment(1)["LD_PRELOAD"] == f"{library}:/opt/libtcmalloc.so"


def test_without_intels_runtime_workers_wait_passively(monkeypatch):
    monkeypatch.setattr(threads, "openmp_library", lambda: None)
    environment = threads.openmp_environment(4)
    assert environment["OMP_NUM_THREADS"] == "4" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "LD_PRELOAD" not in environment


def test_an_engine_gets_its_kv_cache_and_its_share_of_the_threads():
    environment = threads.engine_environment(2)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert [threads.engine_environment(4, ranks)["OMP_NUM_THREADS"] for ranks in (2, 3, 8)] == ["2", "1", "1"]


def test_the_users_log_level_wins(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert threads.engine_environment(1)["VLLM_LOGGING_LEVEL"] == "WARNING"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert threads.engine_environment(1)["VLLM_LOGGING_LEVEL"] == "DEBUG"


ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from cotrain.process import threads
print(threads.num_cores())
"""


def test_cores_are_those_of_this_process():
    out = subprocess.run([sys.executable, "-c", ONE_CORE], capture_output=True, text=True, check=True)
    assert out.stdout == "1\n"


PRIORITY = """
import os
from pathlib import Path
from cotrain.process.threads import low_priority

group = Path("/proc/self/autogroup")
share = lambda: group.read_text().split() if group.exists() else []  # empty where a cgroup has its own share
own = lambda: share()[-1] if share() else "none"
before = own()
with low_priority(7):
    print(os.nice(0), before, own())
assert own() == before
"""


@pytest.mark.parametrize("leads", [True, False])
def test_the_priority_of_a_process_is_that_of_the_session_that_it_leads(leads: bool) -> None:
    """Else it would count among the session's own processes alone, and a host in another session would get no more than its half."""
    run = subprocess.run([sys.executable, "-c", PRIORITY], start_new_session=leads, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    priority, before, after = run.stdout.split()
    assert int(priority) == os.nice(0) + 7
    assert after == (before if before == "none" or not leads else priority)
