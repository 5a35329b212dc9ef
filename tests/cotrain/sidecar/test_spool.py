"""The folder that a host's engines and the trainer share."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain.sidecar.spool import EngineFolder, Settings, Spool, read_json, write_json

SETTINGS = Settings(
    model="tiny:llama", model_path="/models/tiny", speculative_config={"method": "eagle3"}, aux_layers=(2, 4, 5), share=0.5,
    max_bytes=100, adaptive=True, replicas=False,
)  # fmt: skip


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    spool.create(SETTINGS)
    return spool


def test_settings_are_read_as_they_were_written_by_this_user_alone(spool: Spool) -> None:
    assert spool.settings() == SETTINGS
    assert stat.S_IMODE(spool.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "text", [None, "{", "{}", "[]", json.dumps({"model": "m", "aux_layers": [1], "unheard_of": 1})]
)
def test_settings_of_nobody_or_of_another_version_are_an_error(spool: Spool, text: str | None) -> None:
    path = spool.folder / "settings.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"settings\.json cannot be read"):
        spool.settings()


def test_a_trainer_lives_until_it_says_otherwise_or_is_gone(spool: Spool) -> None:
    assert spool.is_alive() and Spool(spool.folder).is_alive()
    spool.abandon()
    assert not spool.is_alive() and not spool.is_alive(), "whoever asks does not take the lock"
    code = "import sys, time; from tests.cotrain.sidecar.test_spool import *; s = Spool(sys.argv[1]); s.create(SETTINGS); print(flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)", str(spool.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline()
        assert spool.is_alive()
        trainer.kill()
    assert not spool.is_alive()
    spool.create(SETTINGS)
    assert spool.is_alive()
    shutil.rmtree(spool.folder)
    assert not spool.is_alive()


def test_a_spool_has_one_owner_until_that_one_is_dead(spool: Spool) -> None:
    assert spool.other_owner("first") is None
    assert spool.other_owner("first") is None
    assert spool.other_owner("second") == {"host": "first", "pid": os.getpid()}
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_json(spool.folder / "owner", {"host": "first", "pid": ended.pid})
    assert spool.other_owner("second") is None
    assert read_json(spool.folder / "owner") == {"host": "second", "pid": os.getpid()}
    assert sorted(path.name for path in spool.folder.iterdir() if "owner" in path.name) == ["owner"]


def shard(engine: EngineFolder, size: int) -> str | None:
    return engine.add_shard(
        lambda path: path.write_bytes(bytes(size)) and None, {"size": size}, size, SETTINGS.max_bytes
    )


def test_unread_shards_of_all_engines_are_bounded(spool: Spool) -> None:
    first, second = spool.engine("1"), spool.engine("2")
    assert [shard(first, 60), shard(second, 30), shard(second, 20)] == [None, None, "spool full"]
    (oldest,) = first.shards()
    assert read_json(oldest.with_suffix(".json")) == {"size": 60}
    oldest.unlink()
    assert shard(second, 20) is None
    assert [path.stat().st_size for path in second.shards()] == [30, 20]


def test_a_shard_that_cannot_be_written_leaves_nothing(spool: Spool) -> None:
    engine = spool.engine("1")

    def full_disk(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert engine.add_shard(full_disk, {}, 4, SETTINGS.max_bytes) == "cannot be written"
    assert not list(engine.features.iterdir())
    shutil.rmtree(spool.folder)
    assert shard(engine, 1) == "cannot be written"
    assert engine.shards() == []


def test_only_attached_engines_are_listed(spool: Spool) -> None:
    spool.engine("1")
    write_json(spool.engine("2").facts, {"attached": True})
    assert [engine.facts.parent.name for engine in spool.engines()] == ["2"]


def test_verdicts_are_read_in_the_order_in_which_they_came(spool: Spool) -> None:
    assert spool.verdicts() == []
    given = [{"model": name, "pid": 1, "reason": None} for name in ("b", "a")]
    for verdict in given:
        spool.add_verdict(verdict)
    assert spool.verdicts() == given
