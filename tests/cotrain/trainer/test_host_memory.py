"""Freed tensors leave the process although newer ones stay."""

import os
import subprocess
import sys

import pytest

from cotrain.actors.drafter import RETURN_FREED

SCRIPT = """
import torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.ones(31 * 2**20, dtype=torch.uint8)  # freed at once: this is what makes glibc raise its own limit
blocks = [torch.ones(8 * 2**20, dtype=torch.uint8) for _ in range(40)]
before = resident()
blocks = blocks[1::2]
print((before - resident()) // 2**20)
"""


def freed_mib(settings: dict[str, str]) -> int:
    run = [sys.executable, "-c", SCRIPT]
    return int(subprocess.run(run, check=True, capture_output=True, text=True, env=os.environ | settings).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_leave_the_process_between_others_that_stay():
    assert freed_mib({}) < 40
    assert freed_mib(RETURN_FREED) > 140  # 20 blocks of 8 MiB
