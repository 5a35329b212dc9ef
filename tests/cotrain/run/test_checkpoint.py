import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from cotrain.records import Versions
from cotrain.run import checkpoint
from cotrain.run.checkpoint import (
    RunState,
    check_resume,
    discard_newer,
    find_defect,
    latest_checkpoint,
    load_state,
    model_fingerprints,
    new_checkpoint,
    newest_state,
)
from cotrain.run.run_dir import RunDir
from cotrain.weights.digests import DigestedFile, file_digest


@pytest.fixture
def run(tmp_path):
    with RunDir(tmp_path, "a", resumed=False) as run_dir:
        yield run_dir


def state_at(step, config=None, fingerprints=None):
    return RunState(step, Versions(step, step // 2), config or {}, fingerprints or {})


def save(run, step, keep_last=9, content=b"weights"):
    with new_checkpoint(run, state_at(step), keep_last) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_bytes(content)


def test_a_saved_state_is_read_back(run):
    save(run, 3)
    folder = latest_checkpoint(run)
    assert folder == run.checkpoint(3)
    assert load_state(folder) == state_at(3)
    assert (folder / "policy" / "model.safetensors").read_bytes() == b"weights"


def test_only_the_last_are_kept(run):
    for step in (1, 2, 3):
        save(run, step, keep_last=2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000002", "step_000003"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    path.write_bytes(b"X" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("COMPLETE", os.unlink, "never completed"),
        ("COMPLETE", truncate, None),
        ("COMPLETE", lambda path: path.write_text('{"schema": 2, "fil'), "COMPLETE is damaged"),
        ("policy/model.safetensors", os.unlink, "missing"),
        ("policy/model.safetensors", truncate, "changed since"),
        ("policy/model.safetensors", flip, "changed since"),
        ("state.json", flip, "changed since"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(run, file, damage, reason, caplog):
    save(run, 1)
    save(run, 2)
    damage(run.checkpoint(2) / file)
    if reason is None:  # Only the line end is gone.
        assert latest_checkpoint(run) == run.checkpoint(2)
    else:
        assert latest_checkpoint(run) == run.checkpoint(1)
        assert reason in caplog.text


def test_a_checkpoint_of_another_version_is_neither_used_nor_passed_over(run):
    """Passed over, it would be deleted with all that a run from the first step on writes again."""
    save(run, 1)
    (run.checkpoint(1) / "COMPLETE").write_text('{"schema": 1, "files": {}}')
    with pytest.raises(ValueError, match="step_000001 has schema 1, this version of cotrain reads 14: resume with"):
        latest_checkpoint(run)
    assert run.checkpoint(1).is_dir()


def test_one_byte_in_the_middle_of_a_large_file_is_noticed(run, caplog):
    save(run, 1)
    save(run, 2, content=bytes(5 * 2**20))
    with (run.checkpoint(2) / "policy" / "model.safetensors").open("r+b") as file:
        file.seek(3 * 2**20)
        file.write(b"\x01")
    assert find_defect(run.checkpoint(2)) == "policy/model.safetensors has changed since it was saved"
    assert latest_checkpoint(run) == run.checkpoint(1)
    assert "policy/model.safetensors has changed since it was saved" in caplog.text


def test_a_file_that_was_hashed_while_it_was_written_is_not_read_again(run, monkeypatch):
    monkeypatch.setattr("cotrain.weights.digests.file_digest", lambda path: "0" if path.stat().st_size > 4096 else "1")
    with new_checkpoint(run, state_at(1), 9) as folder:
        with DigestedFile(folder / "whole") as file:
            for part in (b"x", bytes(5 * 2**20), bytearray(b"yz")):
                file.write(part)
        with DigestedFile(folder / "jumped") as file:
            file.write(bytes(8000))
            file.seek(4)
            file.write(b"back")
    files = json.loads((run.checkpoint(1) / "COMPLETE").read_text())["files"]
    assert files == {
        "whole": xxhash.xxh3_128(b"x" + bytes(5 * 2**20) + b"yz").hexdigest(),
        "jumped": "0",
        "state.json": "1",
    }
    assert sorted(path.name for path in run.checkpoint(1).iterdir()) == ["COMPLETE", "jumped", "state.json", "whole"]
    monkeypatch.undo()
    flip_byte(run.checkpoint(1) / "whole", 3 * 2**20)
    assert find_defect(run.checkpoint(1)) == "jumped has changed since it was saved", "whose digest was made up above"
    monkeypatch.setattr(
        "cotrain.run.checkpoint.file_digest",
        lambda path: files[path.name] if path.name != "whole" else file_digest(path),
    )
    assert find_defect(run.checkpoint(1)) == "whole has changed since it was saved"


def test_the_state_is_that_of_the_moment_in_which_the_checkpoint_was_begun(run):
    stream = {"groups": [1]}
    with new_checkpoint(run, replace(state_at(1), stream=stream), 9):
        stream["groups"].append(2)
    assert load_state(run.checkpoint(1)).stream == {"groups": [1]}


def test_there_may_be_no_checkpoint(run):
    assert latest_checkpoint(run) is None


def test_an_error_while_saving_leaves_nothing_behind(run):
    save(run, 1)
    with pytest.raises(RuntimeError, match="learner died"), new_checkpoint(run, state_at(2), 1) as folder:
        (folder / "half").write_bytes(b"x")
        raise RuntimeError("learner died")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000001"]


def fill_disk(folder):
    (folder / "half").write_bytes(b"x" * 1000)
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def fill_disk_inside_a_library(folder):
    try:
        fill_disk(folder)
    except OSError as error:
        # How safetensors reports it.
        raise ValueError(f'IoError(Os {{ code: 28, kind: StorageFull, message: "{error.strerror}" }})') from None


@pytest.mark.parametrize("write", [fill_disk, fill_disk_inside_a_library])
def test_disk_full_while_saving(run, write):
    save(run, 1)
    refusal = pytest.raises(OSError, match=r"disk full while saving step 2 .*--resume a")
    with refusal as raised, new_checkpoint(run, state_at(2), keep_last=1) as folder:
        write(folder)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000001"]
    assert find_defect(run.checkpoint(1)) is None


KILLED = """
import os, pathlib, signal, sys
import cotrain.run.checkpoint as checkpoint
from cotrain.records import Versions
from cotrain.run.run_dir import RunDir
run = RunDir(pathlib.Path(sys.argv[1]), "a")
kill = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "writing":
    write = checkpoint.write_json
    checkpoint.write_json = lambda path, content: kill() if path.name == "COMPLETE" else write(path, content)
elif sys.argv[2] == "sealing":
    replace = os.replace
    os.replace = lambda source, target: kill() if "step_" in str(target.name) else replace(source, target)
else:
    checkpoint.shutil.rmtree = lambda path, **options: options or kill()
state = checkpoint.RunState(2, Versions(2, 1), {}, {})
with checkpoint.new_checkpoint(run, state, keep_last=1) as folder:
    (folder / "weights").write_bytes(b"new")
"""


@pytest.mark.parametrize(("moment", "newest"), [("writing", 1), ("sealing", 1), ("pruning", 2)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, moment, newest):
    with RunDir(tmp_path, "a", resumed=False) as run:
        save(run, 1)
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment])
    assert process.returncode == -9
    with RunDir(tmp_path, "a") as run:
        assert latest_checkpoint(run) == run.checkpoint(newest)
        discard_newer(run, newest, 0)
        assert not list(run.checkpoints.glob(".tmp_*"))


def test_a_resume_that_finds_no_checkpoint_says_that_it_begins_again(run_config, tmp_path, caplog):
    with RunDir(tmp_path, "first", resumed=False) as run:
        assert newest_state(run, run_config(), {}).step == 0 and not caplog.text
    with RunDir(tmp_path, "first") as run:
        assert newest_state(run, run_config(), {}).step == 0
        assert f"{run.path} has no checkpoint that can be used: it begins again" in caplog.text
        caplog.clear()
        save(run, 2)
        with pytest.raises(ValueError, match="started with other settings"):
            newest_state(run, run_config(), {})
        assert not caplog.text


def test_a_resume_deletes_what_it_will_write_again(run):
    for step in (2, 4):
        save(run, step)
    for folder in (run.path / "samples", run.path / "drafters"):
        folder.mkdir()
    for step in (1, 2, 3):
        run.samples_file(step).write_text("")
        run.drafter(step).mkdir()
    (run.checkpoints / ".tmp_step_000005").mkdir()
    discard_newer(run, step=2, drafter_version=1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000002"]
    assert sorted(path.name for path in (run.path / "samples").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    assert [path.name for path in (run.path / "drafters").iterdir()] == ["v0001"]


def saved_by(config, fingerprints=None):
    return state_at(2, json.loads(config.model_dump_json()), fingerprints)


def test_a_resume_may_change_the_length_and_the_surroundings(run_config, tmp_path):
    saved = saved_by(run_config())
    changes = {
        "steps": 9,
        "checkpoint": {"every": 1},
        "tracking": {"log_drafters": False},
        "cluster": {"strategy": "SPREAD"},
        "validation": {"task": {"type": "reasoning_gym", "name": "chain_sum"}},
    }
    check_resume(run_config(**changes, run_root=tmp_path / "moved"), {}, saved)


def test_a_resume_may_change_the_number_of_ranks(run_config):
    model = run_config().policy.model
    check_resume(
        run_config(policy={"model": model, "num_processes": 4, "sharding": "fsdp2"}), {}, saved_by(run_config())
    )


def test_a_resume_may_change_what_an_alarm_does(run_config):
    drafter = {"model": {"type": "eagle3"}, "on_drafter_failure": "continue", "alarms": {"tolerance": 0.5}}
    check_resume(run_config(drafter=drafter, lossless={"every": 5}), {}, saved_by(run_config()))
    with pytest.raises(ValueError, match=r"drafter.gate.publish_when: 'gain' -> 'always'"):
        check_resume(run_config(drafter=drafter | {"gate": {"publish_when": "always"}}), {}, saved_by(run_config()))


def test_a_resume_may_change_what_only_decides_whether_the_task_can_go_on(run_config, tmp_path):
    task = {"type": "dataset", "path": "rows.jsonl"}
    saved = saved_by(run_config(task=task), {"task": "of the prompts and answers"})
    raised = run_config(
        task=task | {"num_scorers": 2},
        rollout={"max_prompt_tokens": 1024},
        policy={"model": run_config().policy.model, "micro_batch_tokens": 8192},
        stream={"reward_timeout_s": 600.0},
    )
    check_resume(raised, {"task": "of the prompts and answers"}, saved)
    with pytest.raises(ValueError, match="task: its prompts or answers changed since the run began"):
        check_resume(raised, {"task": "of others"}, saved)
    check_resume(
        raised, {"task": "of others"}, saved_by(run_config(task=task))
    )  # of a version without this fingerprint


def test_every_other_change_is_listed(run_config):
    drafter = {"model": {"type": "eagle3", "draft_vocab_size": 4096}}
    changed = run_config(seed=7, drafter=drafter, policy={"model": "other"})
    with pytest.raises(ValueError) as raised:
        check_resume(changed, {}, saved_by(run_config()))
    for line in (
        "policy.model: 'bundled:smollm2-135m-instruct' -> 'other'",
        "drafter.model.draft_vocab_size: None -> 4096",
        "seed: 0 -> 7",
    ):
        assert line in str(raised.value)
    with pytest.raises(ValueError, match=r"drafter\.model\.type: 'eagle3' -> '\(not set\)'"):
        check_resume(run_config(drafter=None), {}, saved_by(run_config()))


def test_another_model_under_the_same_name_is_refused(run_config, tmp_path):
    folder, weights = tmp_path / "model", {"a": torch.zeros(1000)}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    save_file(weights, folder / "model.safetensors")
    saved = saved_by(run_config(), model_fingerprints(folder))
    check_resume(run_config(), model_fingerprints(shutil.copytree(folder, tmp_path / "copy")), saved)
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(ValueError, match="its tokenizer changed since the run began"):
        check_resume(run_config(), model_fingerprints(folder), saved)
    (folder / "tokenizer.json").write_text("{}")
    weights["a"][-1] = 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="its model changed since the run began"):
        check_resume(run_config(), model_fingerprints(folder), saved)


def policy_of(folder, num_mib):
    """A folder with this many MiB of weights in two files."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes(num_mib * 2**19))
    return folder


def flip_byte(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_a_change_of_one_byte_anywhere_is_another_policy(tmp_path):
    folder = policy_of(tmp_path / "model", 12)
    whole = model_fingerprints(folder)
    for path in (folder / "model-1.safetensors", folder / "model-2.safetensors", folder / "generation_config.json"):
        size = path.stat().st_size
        for position in {0, size // 3, size // 2, size - 1}:
            flip_byte(path, position)
            assert model_fingerprints(folder)["model"] != whole["model"], (path.name, position)
            flip_byte(path, position)
    assert model_fingerprints(folder) == whole
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in folder.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    assert model_fingerprints(copied) == whole, "the same policy, copied to another machine"


def test_of_a_large_policy_as_much_is_read_in_even_steps(tmp_path, monkeypatch):
    folder = policy_of(tmp_path / "model", 64)
    monkeypatch.setattr(checkpoint, "FINGERPRINT_MIB", 16)
    whole, read = model_fingerprints(folder), checkpoint.FINGERPRINT_MIB
    found = 0
    for mib in range(32):
        flip_byte(folder / "model-2.safetensors", mib * 2**20 + 5)
        found += model_fingerprints(folder) != whole
        flip_byte(folder / "model-2.safetensors", mib * 2**20 + 5)
    assert found == read / 2, "every fourth MiB of 64"
    with (folder / "model-1.safetensors").open("ab") as file:
        file.write(b"x")
    assert model_fingerprints(folder) != whole
    os.truncate(folder / "model-1.safetensors", 470 * 10**9)  # nothing of it is on the disk
    monkeypatch.undo()
    started = time.process_time()
    model_fingerprints(folder)
    assert time.process_time() - started < 10, "1.4 s measured; all of it would take 8 minutes"
