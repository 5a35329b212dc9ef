"""Machines as a cluster hands them out: a long TMPDIR, a HOME that cannot be written, a user id that nobody has a name for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.config.load import load_config
from cotrain.config.surroundings import cache_problems
from cotrain.models.loading import build_once, cache_folder
from cotrain.process.cluster import LONGEST_TMPDIR
from pipelines.preflight import find_problems

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.toml")
NOBODY = 54321
"""A user id without an entry in /etc/passwd."""
MAY_READ = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
"""The interpreter may lie in root's home folder. It can be read, then, and still nothing of root's can be written."""


def cotrain(*arguments: str, folder: Path, uid: int | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run the command with nothing in its environment but what is given."""
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *MAY_READ] if uid else []
    own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*user, sys.executable, "-m", "pipelines.cli", *arguments],
        cwd=folder, env=own | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_sockets_fit_into_their_paths_whatever_tmpdir_is(tmp_path: Path) -> None:
    """A socket's path has 107 bytes at most. Ray's folder lies in TMPDIR where that is short enough, and else in /tmp."""
    script = """
from contextlib import ExitStack
from cotrain.process.cluster import start_ray
with ExitStack() as stack:
    ray = start_ray(None, stack)
    print(ray._private.worker._global_node.get_session_dir_path())
"""
    short = Path(f"/tmp/{os.getpid()}".ljust(LONGEST_TMPDIR, "x"))
    folders = [short, tmp_path / ("a" * 60) / ("b" * 60)]
    try:
        for folder, base in zip(folders, (short, Path("/tmp")), strict=True):
            folder.mkdir(parents=True)
            own = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
            done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True, timeout=120)
            session = Path(done.stdout.strip())
            assert session.parents[1] == base, done.stdout + done.stderr[-2000:]
            assert not session.parent.exists() and not [*folder.iterdir()]
    finally:
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def nobodys(tmp_path: Path) -> Path:
    """A folder of a user without a name, who can write nothing else."""
    if os.getuid() or not shutil.which("setpriv"):
        pytest.skip("only root can run a command as another user")
    for folder in [folder for folder in tmp_path.parents if folder.name.startswith(("popen-", "pytest-"))]:
        folder.chmod(0o755)
    shutil.chown(tmp_path, NOBODY, NOBODY)
    return tmp_path


@pytest.mark.parametrize("home", [{"HOME": "/"}, {"HOME": "/nonexistent"}, {}], ids=str)
def test_a_home_that_cannot_be_written_is_refused_by_name(nobodys: Path, home: dict[str, str]) -> None:
    """Of a random user id too, as pods have one. A dataset here would else be reported as a file that cannot be read."""
    (nobodys / "data.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    data = ["task=none", "task.type=dataset", "task.path=data.jsonl"]
    for command in (["train", SMOKE, *data], ["train", SMOKE, "--dry-run"], ["sidecar", "--model", "m", "--share=1"]):
        result = cotrain(*command, folder=nobodys, uid=NOBODY, **home)
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
        assert "HOME: " in result.stderr and "set HOME to a folder that can be" in result.stderr, result.stderr
    assert [path.name for path in nobodys.iterdir()] == ["data.jsonl"]


def test_a_user_without_a_name_records_and_lists_drafters(nobodys: Path, empty_mlflow_database: Path) -> None:
    script = """
from pathlib import Path
from cotrain.config.load import load_config
from cotrain.records import Versions
from cotrain.run.provenance import begin_attempt
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from pipelines.preflight import find_problems
config = load_config([SMOKE], ["name=mine"])
problems = find_problems(config, quick=True)
assert problems == [], problems
with RunDir(config.run_root, config.name, resumed=False) as run_dir, Tracker(config) as tracker:
    begin_attempt(run_dir, config, 0)
    folder = Path("drafter")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    tracker.log_drafter(folder, Versions(1, 1), 1, {}, {"init": "random"})
"""
    (nobodys / "runs").mkdir()
    shutil.copy(empty_mlflow_database, nobodys / "runs" / "mlflow.db")
    (nobodys / "script.py").write_text(script.replace("SMOKE", repr(SMOKE)))
    for path in (nobodys / "runs", nobodys / "runs" / "mlflow.db"):
        shutil.chown(path, NOBODY, NOBODY)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *MAY_READ]
    own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(nobodys)}
    done = subprocess.run(
        [*user, sys.executable, "script.py"], cwd=nobodys, env=own, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    listed = cotrain("drafters", "list", folder=nobodys, uid=NOBODY, HOME="/")
    assert "tiny_llama-drafter" in listed.stdout and "serving" in listed.stdout, listed.stderr
    homeless = cotrain("drafters", "list", folder=nobodys, uid=NOBODY)
    assert homeless.returncode == 2 and homeless.stderr.startswith("cotrain: HOME: it is not set"), homeless.stderr


def test_caches_that_have_places_of_their_own_need_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", f"{tmp_path}/file/home")
    for name in ("COTRAIN_CACHE", "HF_HOME", "VLLM_CACHE_ROOT"):
        assert cache_problems() != []
        monkeypatch.setenv(name, str(tmp_path))
    assert cache_problems() == find_problems(load_config([SMOKE]), resume=True, quick=True) == []
    monkeypatch.delenv("COTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/caches")
    assert cache_problems() == [] and cache_folder() == tmp_path / "caches" / "cotrain"
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/file/caches")
    assert cache_problems()[0].endswith("set XDG_CACHE_HOME to a folder that can be")


def test_a_model_that_is_in_the_cache_is_used_where_the_cache_is_read_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in an image that brings its models. A folder of /proc stands for it, which root cannot write either."""
    monkeypatch.setenv("COTRAIN_CACHE", "/proc/self")
    assert build_once("fd", lambda folder: None, "building") == Path("/proc/self/fd")
    with pytest.raises(ValueError, match=r"/proc/self cannot be written; set COTRAIN_CACHE to a folder that can be"):
        build_once("model", lambda folder: None, "building")
