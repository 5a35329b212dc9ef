"""`cotrain init` up to where its roles would start."""

from pathlib import Path

import pytest

from cotrain.config.load import INIT, load_config, write_config
from cotrain.config.schema import RunConfig
from cotrain.run.run_dir import RunDir
from pipelines.cli import main
from pipelines.preflight import read_command_line

SMOKE = "configs/smoke.toml"


def run(root: Path, *arguments: str) -> int:
    return main(["init", SMOKE, f"run_root={root}", *arguments])


def checked(*arguments: str) -> RunConfig:
    found = read_command_line("init", arguments)
    assert found is not None
    return found[0]


def test_a_dry_run_prints_the_configuration(tmp_path, capsys):
    assert run(tmp_path, "--dry-run", "steps=77") == 0
    printed = capsys.readouterr().out
    assert "\nsteps = 77\n" in printed and "\npolicy.train = false\n" in printed
    assert not list(tmp_path.iterdir())


def test_it_trains_a_drafter_alone_and_serves_each_one(tmp_path):
    config = checked("configs/quickstart.toml", f"run_root={tmp_path}", "lossless.every=3")
    assert config.drafter is not None and not config.policy.train and config.drafter.train
    assert config.drafter.train_when == config.drafter.gate.publish_when == "always"
    as_a_run = load_config(["configs/quickstart.toml"], [*INIT, f"run_root={tmp_path}", "lossless.every=3"])
    assert config == as_a_run, "all else is the user's"


def test_what_a_user_sets_wins_also_after_a_resume(tmp_path):
    own = "drafter.gate.publish_when=gain", "rollout.samples_per_prompt=4"
    config = checked(SMOKE, f"run_root={tmp_path}", *own)
    assert config.drafter is not None and config.drafter.gate.publish_when == "gain"
    with RunDir(tmp_path, "smoke", resumed=False) as run_dir:
        write_config(config, run_dir.config)
    assert checked("--resume", "smoke", f"run_root={tmp_path}") == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter=none"], "drafter: `cotrain init` trains a drafter"),
        (["drafter.train=false"], "drafter: `cotrain init` trains a drafter"),
        (["policy.train=true"], "policy.train: `cotrain init` trains no policy; leave it out"),
        (["init.tokens=1000"], "init: unknown field"),
        (["drafter.train_every=3"], "drafter.train_every: 3 is not below steps = 3"),
        (["task=none", "task.type=dataset", "task.path=/no.jsonl"], "task.path: no file or folder"),
        (["drafter.init=/nowhere"], "drafter.init: /nowhere has no config.json"),
    ],
)
def test_what_cannot_run_is_refused_before_the_folder_is_made(tmp_path, capsys, arguments, message):
    assert run(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_used_name_is_refused(tmp_path, capsys):
    (tmp_path / "smoke").mkdir()
    assert run(tmp_path) == 2
    assert "continue it with --resume smoke" in capsys.readouterr().err


def test_resuming_a_run_that_does_not_exist(tmp_path, capsys):
    assert main(["init", "--resume", "gone", f"run_root={tmp_path}"]) == 2
    assert "--resume gone: no such run" in capsys.readouterr().err
