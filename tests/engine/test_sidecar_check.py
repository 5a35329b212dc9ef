"""`cotrain sidecar check` on vLLM's own configuration of an engine, which ends where a model would be loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sidecar_parts import host_environment

pytestmark = pytest.mark.engine

HOST = """
import json, sys
from vllm import EngineArgs
EngineArgs(model=sys.argv[1], max_model_len=256, **json.loads(sys.argv[2])).create_engine_config()
print("a model would be loaded now")
"""


@pytest.mark.parametrize(
    ("options", "arguments", "status", "said"),
    [
        (["--model", "tiny:llama"], "{}", 0, "engines: 1 adopted"),
        pytest.param(
            *(
                ["--model", "tiny:llama"],
                '{"pipeline_parallel_size": 2}',
                1,
                "pipeline_parallel_size is 2: an engine may be divided by tensor_parallel_size alone",
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=["of the engine's own model", "refused"],
)
def test_the_check(
    options: list[str], arguments: str, status: int, said: str, target_folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pipelines.cli", "sidecar", "check", *options, "drafter.model.draft_vocab_size=64"]
    host = [sys.executable, "-c", HOST, str(target_folder), arguments]
    result = subprocess.run(
        [*command, "--", *host], env=host_environment(tmp_path, None), cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == status, result.stderr[-3000:]
    assert said in result.stdout
    assert "a model would be loaded now" not in result.stdout
