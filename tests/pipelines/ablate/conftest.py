"""A study file on the smoke configuration, and its runs by a stand-in."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STUDY = """
name = "first"
config = ["base.toml"]
seeds = [0, 1]
folder = "{folder}"

[inits.generic]
"task.type" = "dataset"
"task.path" = "prompts.jsonl"
"steps" = 5

[[arms]]
name = "generic, frozen"
init = "generic"
"drafter.train" = false

[[arms]]
name = "random, co-trained"
"drafter.train" = true

[[arms]]
name = "no speculation"
drafter = "none"
"policy.train" = false
"""


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    """Three arms, two seeds, one initialisation."""
    folder = tmp_path / "study"
    folder.mkdir()
    shutil.copy(ROOT / "configs" / "smoke.toml", folder / "base.toml")
    (folder / "prompts.jsonl").write_text('{"prompt": "Name a colour.", "answer": "red"}\n')
    path = folder / "study.toml"
    path.write_text(STUDY.format(folder=tmp_path / "studies"))
    return path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Runs are stand-ins. Returns what they were asked to do since the last call, as `command name [options]`."""
    file = tmp_path / "calls"
    monkeypatch.setattr(
        "pipelines.ablate.command.PROGRAM", (sys.executable, str(Path(__file__).parent / "stand_in.py"))
    )
    monkeypatch.setenv("CALLS", str(file))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def new_calls() -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    return new_calls
