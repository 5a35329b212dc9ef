"""The command as a user types it: what is printed where, with which exit status, and without what is slow to import."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cotrain import __version__
from cotrain.config.load import load_config, parse_config
from pipelines.cli import main

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.toml")
SLOW = ("torch", "ray", "vllm", "transformers", "numpy", "pandas", "mlflow", "datasets", "accelerate")
"""What takes up to seconds to import."""


def without(*modules: str) -> str:
    """A program's first line; a module that is None in sys.modules raises when it is imported."""
    return f"import sys; sys.modules.update(dict.fromkeys({modules}));"


NO_TORCH = without("torch", "ray")


def cotrain(
    *arguments: str, folder: Path | None = None, without_torch: bool = False, first: str = "import sys;"
) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    code = f"{NO_TORCH if without_torch else first} from pipelines.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )


def status_of(*arguments: str) -> int:
    """Exit status of the command in this process, which prints what it prints; an error that is no message is raised."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_help_names_the_commands_without_torch() -> None:
    result = cotrain("--help", without_torch=True)
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("train", "verify", "bench", "drafters"))


@pytest.mark.parametrize(("unbuffered", "help_status"), [("", 141), ("1", 0)])  # argparse itself ignores the second
def test_a_reader_that_has_had_enough_ends_a_command_without_a_message(unbuffered: str, help_status: int) -> None:
    """`cotrain simulate ... | head -1`, where the reader is gone before anything is written."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", f"{NO_TORCH} from pipelines.cli import main; sys.exit(main())"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    system = str(ROOT / "configs" / "simulate" / "cpu.toml")
    for arguments, status in ((["--help"], help_status), (["simulate", system], 141)):
        done = subprocess.run([*command, *arguments], env=env, stdout=write, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (status, b"")
    os.close(write)


def test_the_bare_command_prints_its_help() -> None:
    bare, asked = cotrain(without_torch=True), cotrain("--help", without_torch=True)
    assert (bare.returncode, bare.stdout, bare.stderr) == (asked.returncode, asked.stdout, "")


def test_the_package_is_the_command_and_names_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "cotrain", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"cotrain {__version__}\n")
    assert done.stdout == cotrain("--version", without_torch=True).stdout
    wrong = subprocess.run([sys.executable, "-m", "cotrain", "tarin"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "cotrain: error: argument COMMAND: invalid choice: 'tarin'" in wrong.stderr


def test_train_help_explains_every_section_in_an_instant() -> None:
    result = cotrain("train", "--help", first=without(*SLOW))
    assert result.returncode == 0, result.stderr
    assert "cotrain train CONFIG... [key=value...] [--dry-run] [--resume NAME]" in result.stdout
    for section in ("[policy]", "[policy.optimizer]", "[rollout]", "[drafter.model]", "[task]", "[cluster]"):
        assert f"\n{section}" in result.stdout
    assert "Draft tokens per verification step (k)." in result.stdout


def test_dry_run_prints_a_configuration_that_loads_again(tmp_path: Path) -> None:
    changes = ["steps=9", f"run_root={tmp_path}"]
    result = cotrain("train", SMOKE, *changes, "--dry-run", without_torch=True)
    assert result.returncode == 0, result.stderr
    assert parse_config(tomllib.loads(result.stdout)) == load_config([SMOKE], changes)
    assert "# no problem found" in result.stdout
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            "__import__('cotrain.process.failures').process.failures.RunFailure('policy: its process has died')",
            1,
            "its process has died",
        ),
        ("__import__('cotrain.publish.alarms').publish.alarms.DrafterAlarm(7, [])", 1, "cotrain: step 7 raised"),
    ],
)
def test_a_run_that_fails_says_so_without_a_traceback(error: str, status: int, message: str) -> None:
    code = (
        "import sys, types, pipelines.cli as cli\n"
        f"def main(arguments): raise {error}\n"
        "sys.modules['pipelines.bench.command'] = types.SimpleNamespace(main=main)\n"
        "sys.exit(cli.main(['bench']))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == status and message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_where_only_the_engine_side_is_installed_says_what_is_missing() -> None:
    result = cotrain("sidecar", "--model", "m", "--share", "1", without_torch=True)
    assert result.returncode == 2
    assert result.stderr == "cotrain: torch is not installed; commands need cotrain[trainer] (docs/guide/sidecar.md)\n"


def test_overrides_may_stand_on_either_side_of_options() -> None:
    result = cotrain("train", SMOKE, "--dry-run", "seed=5", "rollout.temperature=0.5")
    assert result.returncode == 0, result.stderr
    assert "\nseed = 5\n" in result.stdout and "\nrollout.temperature = 0.5\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "CONFIG: no configuration given"),
        (["train", SMOKE, "stpes=3"], "stpes: unknown field; did you mean steps?"),
        (["train", "no.toml"], "no.toml: no such file"),
        (["train", SMOKE, "rollout.num_speculative_tokens=4"], "rollout.num_speculative_tokens: 4 is above"),
        (["train", SMOKE, "tracking.uri=nowhere", "--dry-run"], "tracking.uri"),
        (["train", "--resume", "nothing"], "--resume nothing: no such run in runs"),
        (["train", SMOKE, "--steps", "3"], "unrecognized arguments: --steps"),
        (["drafters", "list", "extra"], "unrecognized arguments: extra"),
        (["drafters", "pull", "nobody", "folder"], "no drafter 'nobody'"),
        (["tarin"], "invalid choice: 'tarin'"),
    ],
    ids=lambda value: " ".join(value).replace(SMOKE, "smoke.toml") if isinstance(value, list) else "",
)
def test_errors_of_the_user_are_messages_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process; test_train_checks_everything_before_the_run_folder_is_made has one of its own."""
    monkeypatch.chdir(tmp_path)
    assert status_of(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors


def test_train_checks_everything_before_the_run_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    changes = [f"policy.model={tmp_path}/model", "task.name=chain_sun", f"run_root={tmp_path}/runs"]
    result = cotrain("train", SMOKE, *changes)
    assert result.returncode == 2
    assert "2 problems in the configuration" in result.stderr and "Traceback" not in result.stderr
    assert "policy.model: " in result.stderr and "chain_sun" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError of a library is no message to the user."""
    from pipelines import cli, preflight

    def broken(*arguments: object) -> None:
        tomllib.loads("= broken")

    monkeypatch.setattr(preflight, "load_config", broken)
    with pytest.raises(tomllib.TOMLDecodeError):
        cli.main(["train", SMOKE])


def test_a_pipe_that_breaks_elsewhere_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("pipelines.cli.report", broken)
    with open(os.devnull, "w") as output, monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr(sys, "stdout", output)
        main(["report"])
