"""cotrain is installed where a host's vLLM is, and the host does not use it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.sidecar_parts import host_environment

LOAD = """
import json, sys, time
from importlib.metadata import entry_points
(entry,) = {entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "cotrain"}
register = entry.load()
started = time.perf_counter()
register()
seconds = time.perf_counter() - started
print(json.dumps([seconds, sorted(name for name in sys.modules if name.partition(".")[0] in ("cotrain", "torch", "vllm"))]))
"""


def test_without_the_variable_nothing_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD]
    found = subprocess.run(command, env=host_environment(tmp_path, None), capture_output=True, text=True, check=True)
    seconds, modules = json.loads(found.stdout)
    assert modules == ["cotrain", "cotrain.engine", "cotrain.engine.host", "cotrain.engine.host.plugin"]
    assert seconds < 0.005
