"""The folder that a host's engines and the trainer share: whose it is, who lives, and what is left of those who were killed."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cotrain.transport.spool import (
    MARK,
    Description,
    EngineFolder,
    Settings,
    Spool,
    State,
    Verdict,
    read_json,
    remove_leftovers,
    write_json,
)

SETTINGS = Settings(
    model="tiny:llama", model_path="/models/tiny", speculative_config={"method": "eagle3"}, aux_layers=(2, 4, 5), share=0.5,
    max_bytes=100, adaptive=True,
)  # fmt: skip

PLAY = """
import sys
from tests.cotrain.transport.test_spool import *
spool = Spool(sys.argv[1])
if sys.argv[2] == "trainer":
    spool.hold()
    spool.create(SETTINGS)
else:
    kept = spool.join(sys.argv[2])
    write_json(kept.state, State(1))
print(spool.is_alive(), flush=True)
sys.stdin.read()
spool.remove()
"""
OTHER_PIDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
MAY_UNSHARE = shutil.which("unshare") and subprocess.run([*OTHER_PIDS, "true"], capture_output=True).returncode == 0
IN_A_CONTAINER = pytest.param(
    OTHER_PIDS, id="other pids", marks=pytest.mark.skipif(not MAY_UNSHARE, reason="may not make pid namespaces here")
)


class Process(subprocess.Popen):
    """A process that plays the trainer, or an engine of this name. It ends when it is told to, or is killed."""

    def __init__(self, folder: Path, role: str, *before: str):
        command = [*before, sys.executable, "-c", PLAY, str(folder), role]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def is_ready(self) -> bool:
        return self.stdout.readline() == "True\n"

    def kill_it(self) -> None:
        self.kill()
        self.communicate()  # until everybody who has its output open is gone


@pytest.fixture
def play(tmp_path: Path):
    """Starts processes that use tmp_path/spool, and ends them with the test."""
    processes: list[Process] = []

    def start(role: str, *before: str) -> Process:
        processes.append(Process(tmp_path / "spool", role, *before))
        return processes[-1]

    yield start
    for process in processes:
        process.kill_it()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    spool.hold()
    spool.create(SETTINGS)
    return spool


def shard(engine: EngineFolder, size: int) -> str | None:
    return engine.add_shard(
        lambda path: path.write_bytes(bytes(size)) and None, Description([], []), size, SETTINGS.max_bytes
    )


def text_in(folder: Path) -> list[Path]:
    return [*folder.rglob("features/*")]


def test_settings_are_read_as_they_were_written(spool: Spool) -> None:
    assert spool.settings() == SETTINGS


def test_what_is_written_is_for_this_user_alone(spool: Spool) -> None:
    os.umask(os.umask(0))
    engine = spool.join("1")
    assert shard(engine, 10) is None
    write_json(engine.state, State(1))
    spool.add_verdict(Verdict("m", 1))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [spool.folder, *spool.folder.rglob("*")]}
    locks = {spool.folder / MARK}  # there is nothing in it
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file() and path not in locks} == {0o600}


def foreign(make: Callable[[Path], None], folder: Path) -> Spool:
    make(folder)
    return Spool(folder)


def users_own(folder: Path) -> None:
    """Such as .vscode and .claude."""
    (folder / "engines").mkdir(parents=True, mode=0o700)
    (folder / "settings.json").write_text('{"editor.tabSize": 4}')
    folder.chmod(0o700)


def link(folder: Path) -> None:
    users_own(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (users_own, "was not made by cotrain; choose one that is not there"),
        (partial(Path.mkdir, mode=0o700), "was not made by cotrain"),
        (link, r"is lrwxrwxrwx of user \d+: it must be a folder"),
        (Path.touch, r"is -rw-\S* of user \d+: it must be a folder"),
        (partial(Path.mkdir, mode=0o755), r"is drwxr-xr-x of user \d+: it must be a folder, drwx------"),
    ],
    ids=["settings", "empty", "link", "file", "open"],
)
def test_a_folder_of_somebody_else_is_refused_and_stays(make: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    found = foreign(make, tmp_path / "spool")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=why):
        found.hold()
    found.remove()
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("how", ["link", "owner", "mode"])
def test_no_engine_trusts_a_spool_that_is_not_of_its_user_alone(
    how: str, spool: Spool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = spool.join("1")
    if how == "link":
        (tmp_path / "link").symlink_to(spool.folder)
        spool = Spool(tmp_path / "link")
        engine = spool.engine("1")
    elif how == "owner":
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    else:
        spool.folder.chmod(0o750)
    files = sorted(spool.folder.rglob("*"))
    for use in (
        spool.settings,
        lambda: spool.join("2"),
        lambda: spool.add_verdict(Verdict("m", 1)),
    ):
        with pytest.raises(
            ValueError, match=r"is (l|drwx)\S+ of user \d+: it must be a folder, drwx------ of user \d+"
        ):
            use()
    assert not spool.is_alive() and shard(engine, 1) == "cannot be written"
    assert sorted(spool.folder.rglob("*")) == files


@pytest.mark.parametrize(
    "text", [None, "{", "{}", "[]", json.dumps({"model": "m", "aux_layers": [1], "unheard_of": 1})]
)
def test_settings_of_nobody_or_of_another_version_are_an_error(spool: Spool, text: str | None) -> None:
    spool.settings_file.unlink()
    if text is not None:
        spool.settings_file.write_text(text)
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        spool.settings()


def test_a_trainer_lives_until_it_says_otherwise_or_is_gone(spool: Spool) -> None:
    assert spool.is_alive() and Spool(spool.folder).is_alive()
    spool.abandon()
    assert not spool.is_alive()
    spool.create(SETTINGS)
    assert spool.is_alive()
    shutil.rmtree(spool.folder)
    assert not spool.is_alive()


def test_of_two_trainers_that_start_together_one_works_and_stays_alone(play, tmp_path: Path) -> None:
    started = [play("trainer") for _ in range(3)]
    ready = [trainer for trainer in started if trainer.is_ready()]
    assert len(ready) == 1
    for trainer in set(started) - set(ready):
        assert "SpoolError" in trainer.communicate()[1]
    assert Spool(tmp_path / "spool").is_alive()
    with pytest.raises(ValueError, match="another trainer uses"):
        Spool(tmp_path / "spool").hold()
    ready[0].communicate("")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("before", [pytest.param((), id="same pids"), IN_A_CONTAINER])
def test_a_killed_trainer_is_noticed_and_the_next_one_takes_over(before: tuple[str, ...], play, tmp_path: Path) -> None:
    trainer, folder = play("trainer", *before), tmp_path / "spool"
    assert trainer.is_ready() and Spool(folder).is_alive()
    lives, dead = play("lives", *before), play("dead")
    assert lives.is_ready() and dead.is_ready()
    for name in ("lives", "dead"):
        assert shard(Spool(folder).engine(name), 10) is None
    (folder / "initial").mkdir()
    trainer.kill_it()
    dead.kill_it()
    assert not Spool(folder).is_alive()

    spool = Spool(folder)
    spool.hold()
    assert not text_in(folder) and [engine.folder.name for engine in spool.engines()] == ["lives"]
    assert spool.engine("lives").is_held and (folder / "initial").exists(), "it may still have to read it"
    spool.create(SETTINGS)
    assert spool.is_alive() and shard(spool.engine("lives"), 10) is None
    spool.remove()
    assert not text_in(folder) and spool.engine("lives").state.exists() and not spool.is_alive()
    lives.kill_it()
    remove_leftovers(tmp_path)
    assert not any(tmp_path.iterdir())


def test_leftovers_are_removed_and_nothing_else(spool: Spool, tmp_path: Path) -> None:
    users_own(tmp_path / "notes")
    for name, owner in (("killed", os.geteuid()), ("others", os.geteuid() + 1)):
        left = Spool(tmp_path / name)
        left.hold()
        assert shard(left.join("1"), 10) is None
        (left.folder / "mine.txt").write_text("not cotrain's")
        os.chown(left.folder, owner, -1) if os.geteuid() == 0 else None
        del left  # which releases its locks, as the death of a process does
    remove_leftovers(tmp_path)
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["mine.txt"]
    assert (tmp_path / "notes" / "settings.json").exists() and spool.is_alive()
    assert bool(text_in(tmp_path / "others")) is (os.geteuid() == 0)


def test_files_of_others_stay_when_a_trainer_ends(spool: Spool) -> None:
    (spool.folder / "mine.txt").write_text("1")
    engine = spool.join("1")
    (engine.folder.parent / "mine.txt").write_text("1")
    engine.close()
    spool.remove()
    left = [path for path in spool.folder.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["mine.txt", "mine.txt"]


def test_unread_shards_of_all_engines_are_bounded(spool: Spool) -> None:
    first, second = (spool.join(name) for name in "12")
    assert [shard(first, 50), shard(second, 30), shard(second, 30)] == [None, None, "spool full"]
    (oldest,) = first.shards()
    assert oldest.stat().st_size == 50 and read_json(oldest.with_suffix(".json"), Description) == Description([], [])
    (second.policies / "0.safetensors").write_bytes(bytes(150))
    assert [shard(second, 25), shard(second, 5)] == ["spool full", None], "heads do not count"
    oldest.unlink()
    assert shard(second, 20) is None
    assert [path.stat().st_size for path in second.shards()] == [30, 5, 20]


def test_a_shard_that_cannot_be_written_leaves_nothing(spool: Spool) -> None:
    engine = spool.join("1")

    def full_disk(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert engine.add_shard(full_disk, Description([], []), 4, SETTINGS.max_bytes) == "cannot be written"
    assert not list(engine.features.iterdir())
    (engine.features / "notes.json").write_text("{}")
    assert engine.shards() == [], "another program's"
    shutil.rmtree(spool.folder)
    assert shard(engine, 1) == "cannot be written"


def test_verdicts_are_read_in_the_order_in_which_they_came(spool: Spool) -> None:
    assert spool.verdicts() == []
    given = [Verdict(name, 1) for name in ("b", "a")]
    for verdict in given:
        spool.add_verdict(verdict)
    assert spool.verdicts() == given
    for name, text in (("x", "[]"), ("y", "5"), ("z", "{")):
        (spool.folder / "verdicts" / f"{name}.json").write_text(text)
    assert spool.verdicts() == given, "and what others have written is none"
