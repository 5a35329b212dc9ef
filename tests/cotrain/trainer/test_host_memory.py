"""Freed tensors leave the process although newer ones stay."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from cotrain.trainer.memory import return_freed_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "return":
    assert return_freed_blocks()
torch.ones(31 * 2**20, dtype=torch.uint8)  # freed at once: this is what makes glibc raise its own limit
blocks = [torch.ones(8 * 2**20, dtype=torch.uint8) for _ in range(40)]
before = resident()
blocks = blocks[1::2]
print((before - resident()) // 2**20)
"""


def freed_mib(mode: str) -> int:
    return int(subprocess.run([sys.executable, "-c", SCRIPT, mode], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_leave_the_process_between_others_that_stay():
    assert freed_mib("keep") < 40
    assert freed_mib("return") > 140  # 20 blocks of 8 MiB
