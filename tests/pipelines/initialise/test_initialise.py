"""`cotrain init` up to where an engine would start, and its summary."""

from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.initialise.pipeline import summary

SMOKE = "configs/smoke.toml"


def run(root: Path, *arguments: str) -> int:
    return main(["init", SMOKE, f"run_root={root}", *arguments])


def test_a_dry_run_prints_the_configuration(tmp_path, capsys):
    assert run(tmp_path, "--dry-run", "steps=77") == 0
    assert "\nsteps = 77\n" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter=none"], "drafter: `cotrain init` trains a drafter; add [drafter.model]"),
        (["init.tokens=1000"], "init: unknown field"),
        (["drafter.train_every=4"], "drafter.train_every: 4 is more than steps = 3"),
        (["task=none", "task.type=dataset", "task.path=/no.jsonl"], "task.path: no file or folder"),
        (["drafter.init=auto"], 'drafter.init: "auto" is for `cotrain train`'),
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


def test_the_summary_says_what_came_out_and_what_to_do_next(run_config):
    figures = {
        "response_tokens": 5000, "vocabulary_coverage": 0.987, "steps": 30,
        "expected_acceptance_length": 1.88, "served_acceptance_length": 1.9, "seconds": 130.0,
    }  # fmt: skip
    config = run_config(policy={"model": "tiny:llama"}, rollout={"num_speculative_tokens": 2})
    text = summary(figures, config, Path("runs/x/drafter"), "tiny-drafter")
    for part in [
        "5,000 response tokens, 30 steps, 2m",
        "covers 98.70%",
        "expected 1.880, served 1.900",
        "models:/tiny-drafter@serving",
        "drafter.init=runs/x/drafter",
        "cotrain bench --model tiny:llama --drafter runs/x/drafter",
    ]:
        assert part in text
