import json
import subprocess
import sys

import pytest

from cotrain.run.run_dir import RunDir
from drafters.files import write_json


def test_paths_of_a_run(tmp_path):
    with RunDir(tmp_path, "a", resumed=False) as run:
        names = [run.checkpoint(40), run.samples_file(40), run.drafter(7), run.metrics, run.config, run.provenance]
        assert [str(path.relative_to(tmp_path / "a")) for path in names] == [
            "checkpoints/step_000040",
            "samples/step_000040.jsonl",
            "drafters/v0007",
            "metrics.jsonl",
            "config.json",
            "provenance.json",
        ]


def test_a_used_name_is_refused(tmp_path):
    RunDir(tmp_path, "a", resumed=False).close()
    with pytest.raises(ValueError, match=r"run_root: cannot make .*/a \(File exists\)"):
        RunDir(tmp_path, "a", resumed=False)


def test_a_run_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="run_root: "):
        RunDir(tmp_path / "runs", "a", resumed=False)


HOLD = """
import sys, pathlib
from cotrain.run.run_dir import RunDir
run = RunDir(pathlib.Path(sys.argv[1]), "a")
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_run_one_run_and_a_killed_one_frees_it(tmp_path):
    RunDir(tmp_path, "a", resumed=False).close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="is being run by another process"):
        RunDir(tmp_path, "a")
    holder.kill()
    holder.wait()
    RunDir(tmp_path, "a").close()


def test_each_attempt_has_its_logs_and_latest_follows(tmp_path):
    with RunDir(tmp_path, "a", resumed=False) as run:
        run.start_attempt()
        (run.logs / "policy.log").write_text("first")
        run.start_attempt()
        assert run.logs.resolve().name == "attempt_2"
        assert list(run.logs.iterdir()) == []
        assert (tmp_path / "a/logs/attempt_1/policy.log").read_text() == "first"


def test_write_json_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
