"""The command on a stand-in for the runs; report and folders are real."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from cotrain.config.errors import ConfigError
from pipelines.ablate.command import _check as check_arms
from pipelines.ablate.command import last_error, main
from pipelines.ablate.plan import load_study

SEED_0 = ["train generic-frozen-s0", "train random-co-trained-s0", "train no-speculation-s0"]
SEED_1 = [call.replace("-s0", "-s1") for call in SEED_0]


@pytest.fixture(autouse=True)
def no_preflight(monkeypatch):
    """Model and task are not what is tested here, and take seconds."""
    monkeypatch.setattr("pipelines.ablate.command._check", lambda study, quick: None)


@pytest.fixture
def no_page(monkeypatch):
    """The page is looked at in one test, and takes a second."""

    def write(folder: Path) -> Path:
        (folder / "report").mkdir(exist_ok=True)
        (folder / "report/report.md").write_text("a table")
        return folder / "report/report.md"

    monkeypatch.setattr("pipelines.ablate.report.write_study_report", write)


def statuses(tmp_path: Path) -> dict[str, str]:
    state = json.loads((tmp_path / "studies/first/study.json").read_text())
    return {run["folder"]: run["status"] for arm in state["arms"] for run in arm["runs"]}


def test_a_study_runs_every_arm_with_every_seed_once(study_file, calls, tmp_path, capsys):
    assert main([str(study_file)]) == 0
    assert calls() == ["train generic", *SEED_0, *SEED_1]
    folder = tmp_path / "studies/first"
    state = json.loads((folder / "study.json").read_text())
    assert state["steps"] == 3 and state["seeds"] == [0, 1]
    assert state["arms"][0] == {
        "name": "generic, frozen",
        "runs": [
            {"seed": seed, "folder": f"runs/generic-frozen-s{seed}", "status": "finished", "error": None}
            for seed in (0, 1)
        ],
    }  # fmt: skip
    output = capsys.readouterr().out
    assert f"[2/7] generic, frozen, seed 0 begins; its output is {folder}/logs/" in output
    assert "[2/7] generic, frozen, seed 0: finished, eta" in output
    assert "| no speculation" in output
    assert "report.html" in output
    config = json.loads((folder / "runs/generic-frozen-s1/config.json").read_text())
    assert config["seed"] == 1 and config["drafter"]["init"] == str(folder / "inits/generic/drafter")
    assert (folder / "runs/generic-frozen-s1/experiment").read_text() == "first"

    assert main([str(study_file)]) == 0
    assert calls() == []


@pytest.mark.parametrize("keep", [False, True])
def test_checkpoints_of_finished_runs_are_kept_only_when_asked_for(study_file, calls, no_page, tmp_path, keep):
    folder = tmp_path / "studies/first/runs/no-speculation-s0/checkpoints"
    arguments = [str(study_file), "seeds=[0]", f"keep_checkpoints={str(keep).lower()}"]
    assert main(arguments) == 0
    assert folder.exists() == keep


def test_a_failing_arm_does_not_stop_the_others_and_is_run_again(
    study_file, calls, no_page, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FAIL", "random-co-trained-s0")
    assert main([str(study_file)]) == 1
    assert calls() == ["train generic", *SEED_0, *SEED_1]
    assert "random, co-trained, seed 0: FAILED: RuntimeError: the engine died" in capsys.readouterr().out
    assert [name for name, status in statuses(tmp_path).items() if status == "failed"] == ["runs/random-co-trained-s0"]
    monkeypatch.delenv("FAIL")
    assert main([str(study_file)]) == 0
    assert calls() == ["train random-co-trained-s0"]
    assert set(statuses(tmp_path).values()) == {"finished"}


def test_a_failed_initialisation_fails_its_arms_alone(study_file, calls, no_page, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAIL", "generic")
    assert main([str(study_file), "seeds=[0]"]) == 1
    assert calls() == ["train generic", *SEED_0[1:]]
    error = "its initialisation generic failed: RuntimeError: the engine died"
    state = json.loads((tmp_path / "studies/first/study.json").read_text())
    assert state["arms"][0]["runs"][0]["error"].startswith(error)


def test_an_experiment_of_the_user_is_kept(study_file, calls, no_page, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert main([str(study_file), "seeds=[0]"]) == 0
    assert (tmp_path / "studies/first/runs/no-speculation-s0/experiment").read_text() == "mine"


def test_a_dry_run_writes_nothing(study_file, calls, tmp_path, capsys):
    assert main([str(study_file), "--dry-run"]) == 0
    assert calls() == [] and not (tmp_path / "studies").exists()
    output = capsys.readouterr().out
    assert "init generic: start" in output and "no speculation, seed 1: start" in output


@pytest.fixture
def interrupt(tmp_path, monkeypatch):
    """Interrupts this process once an arm that waits for it has made its first step."""
    monkeypatch.setenv("SLOW", "random-co-trained-s0")
    folder = tmp_path / "studies/first"
    metrics = folder / "runs/random-co-trained-s0/metrics.jsonl"

    def interrupt_when_slow() -> None:
        deadline = time.monotonic() + 30
        while (not metrics.exists() or not metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(int(os.environ.get("SIGNALS", "1"))):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    return threading.Thread(target=interrupt_when_slow)


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(
    study_file, calls, no_page, tmp_path, capsys, monkeypatch, interrupt
):
    interrupt.start()
    assert main([str(study_file), "seeds=[0]"]) == 130
    interrupt.join()
    output = capsys.readouterr().out
    assert "random, co-trained, seed 0: stopped" in output and "the same command goes on:\n  cotrain ablate" in output
    assert list(statuses(tmp_path).values()) == ["finished", "missing", "missing"]
    calls()
    monkeypatch.delenv("SLOW")
    assert main([str(study_file), "seeds=[0]"]) == 0
    assert calls() == ["train random-co-trained-s0 --resume random-co-trained-s0", "train no-speculation-s0"]
    assert set(statuses(tmp_path).values()) == {"finished"}


def test_a_second_ctrl_c_ends_the_run_and_the_study(study_file, calls, no_page, tmp_path, monkeypatch, interrupt):
    monkeypatch.setenv("SIGNALS", "2")
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        main([str(study_file), "seeds=[0]"])
    interrupt.join()
    assert (tmp_path / "studies/first/runs/random-co-trained-s0/checkpoints/step_000001/COMPLETE").exists()
    assert list(statuses(tmp_path).values()) == ["finished", "missing", "missing"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("cotrain: 2 problems in the configuration:\n  a: wrong\n  b: wrong", "2 problems in the configuration: a: wrong b: wrong"),
        ("Traceback:\n  File x\nray.exceptions.RayError: gone\n  on node 2\ncleaning up", "ray.exceptions.RayError: gone on node 2"),
        ("greedy output: 7 of 8 prompts DIFFERS\nDone", "greedy output: 7 of 8 prompts DIFFERS"),
        ("", "exit status 1 without output"),
    ],
)  # fmt: skip
def test_the_error_of_a_run_is_the_line_that_says_why(tmp_path, text, error):
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log", 1) == error
    assert last_error(tmp_path / "log", -9) == "killed by SIGKILL (out of memory?)"


def test_two_processes_cannot_run_one_study(study_file, calls, no_page, tmp_path):
    assert main([str(study_file), "seeds=[0]"]) == 0
    running = tmp_path / "studies/first/runs/no-speculation-s0"
    (running / "metrics.jsonl").unlink()
    with FileLock(running / "run.lock"), pytest.raises(ValueError, match="is being run by another process"):
        main([str(study_file)])


def test_a_folder_of_another_study_is_refused(study_file, calls, no_page, tmp_path):
    arguments = [str(study_file), "seeds=[0]"]
    assert main(arguments) == 0
    calls()
    base = study_file.with_name("base.toml")
    base.write_text(base.read_text().replace("steps = 3", "steps = 4"))
    with pytest.raises(ConfigError, match="steps: 3 -> 4"):
        main(arguments)
    assert calls() == []


def test_what_is_wrong_with_an_arm_is_said_before_anything_runs(study_file, monkeypatch):
    monkeypatch.setattr("pipelines.preflight.find_problems", refuse)
    with pytest.raises(ConfigError) as error:
        check_arms(load_study(study_file), quick=False)
    assert error.value.problems == ["init: (in 'generic')", "no drafter (in 'no speculation')"]


def test_data_that_an_initialisation_lacks_is_named_before_anything_runs(study_file):
    study_file.with_name("prompts.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"task\.path.*prompts\.jsonl.*\(in 'generic'\)"):
        check_arms(load_study(study_file), quick=True)


def refuse(config, resume, command, quick):
    assert resume, "its folder may exist"
    return ["init:"] if command == "init" else ["no drafter"] if config.drafter is None else []
