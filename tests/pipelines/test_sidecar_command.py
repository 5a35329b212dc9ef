"""`cotrain run` and `cotrain sidecar` as a user types them: help, mistakes, and what is printed at the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.engine.host.adoption import CHECK_VARIABLE
from cotrain.transport.spool import VARIABLE, Verdict
from pipelines.sidecar import command
from pipelines.sidecar.command import engines_text
from tests.pipelines.test_cli import cotrain, status_of

QUICK = ["name=first"]
ADOPTED = Verdict("m", 1)

HOST = """
import json, os, sys
json.dump(dict(os.environ), open(sys.argv[1], "w"))
sys.exit(int(sys.argv[2]))
"""
ENGINE = """
import json, os, pathlib
folder = pathlib.Path(os.environ["COTRAIN_SIDECAR"], "verdicts")
folder.mkdir(exist_ok=True)
wanted = json.loads((folder.parent / "trainer" / "settings.json").read_text())["model"]
reason = None if wanted == "tiny:llama" else "of another model"
(folder / "1.json").write_text(json.dumps({"model": "tiny:llama", "pid": os.getpid(), "reason": reason}))
"""
"""Stands for an engine that leaves its verdict; tests/engine/test_sidecar_check.py has a real one."""


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("run", ["-- accelerate launch", "cotrain must be installed", "num_speculative_tokens", "exit status"]),
        ("sidecar", ["COTRAIN_SIDECAR=", "--share", "vllm_xargs", "cotrain sidecar check"]),
    ],
)
def test_help_shows_the_command_to_type_without_torch(name: str, texts: list[str]) -> None:
    result = cotrain(name, "--help", without_torch=True)
    assert result.returncode == 0 and all(text in result.stdout for text in texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--model", "m"], "write it after --"),
        (["run", "--", "true"], "model: missing"),
        (["run", "--model", "m", "adaptiv=false", "--", "true"], "did you mean adaptive?"),
        (["run", "--model", "m", "share=2", "--", "true"], "share: "),
        (["run", "--model", "m", "--", "no_such_cmd"], "COMMAND: no_such_cmd cannot be run here"),
        (["sidecar", "check", "--model", "m", "--", "./no"], "COMMAND: ./no cannot be run here"),
        (
            ["run", "--model", "m", "--drafter", "suffix", "--", "true"],
            "--drafter: 'suffix' is no folder; give one of eagle3, dflash, dspark, mtp, draft_model, native, a folder or",
        ),
        (["sidecar", "--model", "m"], "--share: say which share"),
        (["sidecar", "check", "--model", "m"], "write it after --"),
        (["sidecar", "check", "--", "true"], "model: missing"),
        (["run", "--model", "m", "replicas=true", "--", "true"], "replicas: unknown field"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_messages(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and "start the engine" not in said.out


def test_a_trainer_that_cannot_begin_is_a_message_before_the_host_starts(tmp_path: Path) -> None:
    """The trainer's own message, which `cotrain sidecar` prints as well, and the end of `cotrain run`."""
    result = cotrain("run", "--model", "m", "--", "touch", "started", folder=tmp_path)
    assert result.returncode == 1 and "before it was ready" in result.stderr and "model: " in result.stderr
    assert "Traceback" not in result.stderr and "start the engine" not in result.stdout
    assert not (tmp_path / "started").exists()


def test_a_host_without_an_engine_is_told_the_usual_causes(mlflow_database: Path) -> None:
    folder = mlflow_database.parents[1]
    options = ["--model", "tiny:llama", *QUICK, f"spool={folder}/spool"]
    result = cotrain("run", *options, "--", sys.executable, "-c", HOST, f"{folder}/seen", "7", folder=folder)
    assert result.returncode == 7  # the host's
    seen = json.loads((folder / "seen").read_text())
    assert seen[VARIABLE] == f"{folder}/spool"
    assert "none asked for a drafter" in result.stdout and "VLLM_PLUGINS" in result.stdout
    assert "runs/first" in result.stdout
    assert not (folder / "spool").exists()


def test_a_trainer_whose_parent_is_gone_ends(mlflow_database: Path) -> None:
    """`kill -9` of `cotrain run` leaves nothing behind."""
    folder = mlflow_database.parents[1]
    options = ["--model", "tiny:llama", "--share", "1", "--spool", f"{folder}/spool", *QUICK]
    parent = (
        "import os, sys, time; from cotrain.sidecar.launch import trainer_beside\n"
        "command = [*sys.argv[2:], f'--with-parent={os.getpid()}']\n"
        "with trainer_beside(command, sys.argv[1]) as trainer:\n"
        "    print(trainer.pid, flush=True); time.sleep(600)"
    )
    trainer = [sys.executable, "-m", "pipelines.cli", "sidecar", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    started = subprocess.Popen(
        [sys.executable, "-c", parent, f"{folder}/spool", *trainer],
        cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout is not None
    lines = iter(started.stdout)
    next(line for line in lines if line.strip().isdigit())
    started.send_signal(signal.SIGKILL)
    assert any("Done: no round of training" in line for line in lines)  # the pipe ends with the trainer
    assert not (folder / "spool").exists()


TRAINER = """
import os, sys, types
os.sched_getaffinity = lambda process: range(6)  # a machine of six cores, whatever a test process may use of this one
def serve(config, resume, stop, ready):
    early = "torch" in sys.modules  # it reads the number of threads when it is imported, and takes no more than there are cores
    print(os.environ["OMP_NUM_THREADS"], early, os.getpriority(os.PRIO_PROCESS, 0), "/models/m" in ready("/models/m"))
    sys.exit()
sys.modules["cotrain.sidecar.service"] = types.SimpleNamespace(serve=serve)
from pipelines.sidecar.command import sidecar
sidecar(["--model", "bundled:m", "--share", "1", *sys.argv[1:]])
"""


@pytest.mark.parametrize(("arguments", "threads"), [(["num_threads=2"], 2), ([], 3)], ids=["two", "half of the cores"])
def test_the_trainer_leaves_the_cores_to_the_host(arguments: list[str], threads: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "64"}
    command = [sys.executable, "-c", TRAINER, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    priority = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 19)
    assert result.stdout == f"{threads} False {priority} True\n", result.stderr


def test_the_check_says_that_an_engine_would_be_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.sidecar(["check", "--model", "tiny:llama", *QUICK, "--", sys.executable, "-c", ENGINE]) == 0
    assert capsys.readouterr().out.endswith("engines: 1 adopted\n")
    assert not any(tmp_path.iterdir())


def test_the_check_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = ENGINE.replace('"tiny:llama" else', '"other" else')
    assert command.sidecar(["check", "--model", "tiny:llama", *QUICK, "--", sys.executable, "-c", code]) == 1
    assert "not adopted, tiny:llama: of another model" in capsys.readouterr().out


def test_the_check_sets_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(command, "run_host", lambda host, spool, **environment: given.append(environment))
    monkeypatch.chdir(tmp_path)
    assert command.sidecar(["check", "--model", "tiny:llama", "--", "true"]) == 1
    assert given == [{CHECK_VARIABLE: "1"}]


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([ADOPTED, ADOPTED], "1 adopted"),
        ([ADOPTED, Verdict("m", 2)], "2 adopted"),
        ([ADOPTED, Verdict("judge", 1, "no")], "1 adopted\nnot adopted, judge: no"),
        ([], command.CAUSES),
    ],
    ids=["one asked twice", "two", "one of two", "none"],
)
def test_engines_in_words(verdicts: list[Verdict], text: str) -> None:
    assert engines_text(verdicts) == text
