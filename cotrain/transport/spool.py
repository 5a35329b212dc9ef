"""The spool: the folder through which a host's engines and the trainer beside them exchange files (docs/guide/sidecar.md).

It holds text of requests, in memory that other users may see, so it is used only while it is this user's alone. Who works with it
holds a lock on a file in it. The system releases a lock with its process, and shows it in every container that shares the folder.
A file gets its name only when it is complete. A host's processes use this module, so it imports nothing that vLLM does not need.
"""

import fcntl
import functools
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from cotrain.records import GainReport, Segment

VARIABLE = "COTRAIN_SIDECAR"
"""Environment variable with the spool's folder. Without it, cotrain does nothing in an engine."""

MARK = ".cotrain-spool"
"""Lock file of the one trainer that may use a folder. A folder without it was not made by cotrain."""

Record = TypeVar("Record")
ADAPTER: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


class SpoolError(ValueError):
    """A folder cannot be used as a spool. The message says why, and what to do."""


@dataclass(frozen=True)
class Settings:
    """Settings of the trainer that hold for every engine."""

    model: str  # the policy, as the host names it
    model_path: str  # the folder that this name stands for
    speculative_config: dict[str, Any]  # vLLM's own argument
    aux_layers: tuple[int, ...]
    share: float  # share of the requests that are tapped, 0 to 1
    max_bytes: int  # most bytes of shards that the trainer has not read; further ones are dropped
    adaptive: bool  # choose the draft length by measured speed, instead of always drafting as many tokens as possible
    adapter: str = ""  # whose requests are tapped, see SidecarConfig


@dataclass(frozen=True)
class Offer:
    """The drafter that all engines are to serve."""

    version: int = 0  # 0: the one that they started with
    on: bool = True  # may they draft at all?
    path: str = ""
    digests: dict[str, str] | None = None
    expected_rates: list[float] | None = None


class Verdict(NamedTuple):
    """Whether an engine was adopted, and the reason if it was not."""

    model: str
    pid: int
    reason: str | None = None


@dataclass(frozen=True)
class State:
    """What an engine says of itself: when it has loaded its model, and then about once a second while it works."""

    pid: int
    reason: str | None = None  # why it may not draft
    vllm: str = ""
    dtype: str = ""
    policy_version: int = 0
    drafter_version: int = 0
    refused: dict[int, str] = field(default_factory=dict)  # the drafter that it did not take, and why
    dropped: Counter[str] = field(default_factory=Counter)  # requests that the trainer does not get, by reason
    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # of requests, verification steps and tokens


@dataclass(frozen=True)
class Finished:
    """What a shard's description says of a request, besides its features."""

    name: str
    prompt_length: int
    finish_reason: str
    verification_steps: tuple[tuple[int, int], ...]
    earlier: tuple[Segment, ...] = ()  # with versions of the policy as the engine counts them


class Description(NamedTuple):
    """What lies beside a shard: its requests, and what speculation gained since the shard before."""

    rollouts: list[Finished]
    gains: list[GainReport]


def write_json(path: Path, record: Any) -> None:
    """Write a record, or anything else that JSON can hold."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(ADAPTER(type(record)).dump_json(record))
    os.replace(partial, path)


def read_json(path: Path, kind: type[Record]) -> Record | None:
    """Return the record that a file holds, or None if there is no such file. Raises ValueError if it holds something else."""
    try:
        return ADAPTER(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{path} is not what cotrain writes") from error


def locked(path: Path, kind: int, mode: str = "a") -> IO[str]:
    """Open and lock a file, until the result is closed or dropped. Raises BlockingIOError if another process holds it."""
    file = path.open(mode)
    fcntl.flock(file, kind)
    return file


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file."""
    try:
        locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB, "r").close()
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def remove_leftovers(*bases: Path) -> None:
    """Remove from these folders what killed trainers of this user have left there: text of requests, heads and drafters."""
    for mark in {mark for base in bases for mark in base.glob(f"*/{MARK}")}:
        spool = Spool(mark.parent)
        with suppress(OSError, ValueError):  # another user's, or its trainer lives
            spool.hold()
            spool.remove()


class Spool:
    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.initial, self._mark = self.folder / "initial", self.folder / MARK
        self.settings_file, self.current = (self.folder / "trainer" / f"{n}.json" for n in ("settings", "current"))
        self._engines, self._verdicts = self.folder / "engines", self.folder / "verdicts"
        self._held: IO[str] | None = None

    def check(self) -> None:
        """Raise SpoolError unless this is a folder of this user, which no other user may enter, and no link."""
        try:
            found = self.folder.lstat()
        except OSError as error:
            raise SpoolError(f"spool: {self.folder}: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            this = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
            raise SpoolError(f"spool: {self.folder} is {this}: it must be a folder, drwx------ of user {os.geteuid()}")

    def hold(self) -> None:
        """Keep other trainers out of the folder, which is made, or cleared of what a killed trainer has left. Then `create` it.

        Raises SpoolError when it is not this user's alone or was not made by cotrain, or when another trainer uses it.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            self.check()
            if not self._mark.is_file():
                this = f"spool: {self.folder} was not made by cotrain"
                raise SpoolError(f"{this}; choose one that is not there") from None
        except OSError as error:
            raise SpoolError(f"spool: {self.folder} cannot be made: {error.strerror}") from error
        try:
            self._held = locked(self._mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpoolError(f"spool: another trainer uses {self.folder}; stop it, or choose another folder") from None
        self._clear()

    def create(self, settings: Settings) -> None:
        """Write the settings for the engines. From then on `is_alive` is True. Call `hold` before."""
        for folder in (self.settings_file.parent, *(engine.features for engine in self.engines())):
            folder.mkdir(mode=0o700, exist_ok=True)
        write_json(self.settings_file, settings)

    def settings(self) -> Settings:
        """Read the settings. Raises SpoolError when there are none that this user and this version of cotrain have written."""
        self.check()
        with suppress(OSError, ValueError):
            if (settings := read_json(self.settings_file, Settings)) is not None:
                return settings
        remedy = "start the trainer first, and of this version of cotrain"
        raise SpoolError(f"{self.settings_file} cannot be read: {remedy}")

    def abandon(self) -> None:
        """Let engines behave as if the trainer were gone, so that they tap no more requests."""
        self.settings_file.unlink(missing_ok=True)

    def is_alive(self) -> bool:
        """Whether the trainer lives and is ready for engines."""
        with suppress(ValueError):
            self.check()
            return self.settings_file.exists() and is_locked(self._mark)
        return False

    def remove(self) -> None:
        """Remove what trainer and engines have written since `hold`, and then the folder, unless it holds other files.

        What living engines need stays: their heads, and the drafter that they start with. The next trainer finds them there, and
        any trainer or engine of this user removes it once they have ended.
        """
        if self._held is not None and not self._clear():
            self._mark.unlink()
            with suppress(OSError):
                self.folder.rmdir()
        self._held = None

    def _clear(self) -> bool:
        """Remove the trainer's files, all text of requests, and engines that have ended. Returns whether an engine lives."""
        self.abandon()  # an engine that joins from here on finds no trainer
        lives, removed = {engine: engine.is_held for engine in self.engines()}, self.folder / ".removed"
        paths = [engine.features if is_held else engine.folder for engine, is_held in lives.items()]
        paths += [] if any(lives.values()) else [self.initial]
        for path in (removed, self.settings_file.parent, self._verdicts, *paths):
            with suppress(OSError):
                path.rename(removed)  # with what an engine is writing there at this moment
            shutil.rmtree(removed, ignore_errors=True)
        with suppress(OSError):
            self._engines.rmdir()
        return any(lives.values())

    def join(self, instance_id: str) -> "EngineFolder":
        """Make the part of the spool that one engine writes. The engine lives as long as the result is kept.

        Raises SpoolError when the spool is not this user's alone.
        """
        self.check()
        self._engines.mkdir(mode=0o700, exist_ok=True)
        (engine := self.engine(instance_id)).hold()
        return engine

    def add_verdict(self, verdict: Verdict) -> None:
        """Record whether an engine was adopted. Raises OSError or SpoolError when it cannot be written."""
        self.check()
        self._verdicts.mkdir(mode=0o700, exist_ok=True)
        write_json(self._verdicts / f"{time.time_ns()}.json", verdict)

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on all engines that looked for the trainer, in their order."""
        found = []
        for path in sorted(self._verdicts.glob("*.json")):
            with suppress(ValueError):  # no engine has written it
                found.append(ADAPTER(Verdict).validate_json(path.read_bytes()))
        return found

    def engine(self, instance_id: str) -> "EngineFolder":
        return EngineFolder(self._engines / instance_id)

    def engines(self) -> list["EngineFolder"]:
        """Return the folders of all engines. Those that have not loaded their model have no state.json yet."""
        return [EngineFolder(path.parent) for path in sorted(self._engines.glob("*/lock"))]


class EngineFolder:
    """The part of a spool that one engine writes."""

    def __init__(self, folder: Path):
        self.folder, self._lock, self._numbers = folder, folder / "lock", count()
        self.state, self.policies, self.features = folder / "state.json", folder / "policy", folder / "features"

    def hold(self) -> None:
        """Make the folder, and show that an engine lives as long as this object does."""
        for folder in (self.folder, self.policies, self.features):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._lock.touch(mode=0o600)
        self._lives = locked(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        self._lives.close()

    @property
    def is_held(self) -> bool:
        """Whether a process of the engine lives."""
        return is_locked(self._lock)

    def add_shard(
        self, write: Callable[[Path], None], described: Description, num_bytes: int, max_bytes: int
    ) -> str | None:
        """Write a shard of num_bytes with `write`, then its description. Return why it was dropped, or None.

        Unread shards of all engines share max_bytes. A shard is also dropped when the disk is full or the spool is gone.
        """
        path = self.features / f"{next(self._numbers):09d}.safetensors"
        try:
            Spool(self.folder.parents[1]).check()
            if num_bytes + self.num_bytes() > max_bytes:
                return "spool full"
            write(path)
            path.chmod(0o600)
            write_json(path.with_suffix(".json"), described)
        except Exception:  # safetensors has an exception of its own for a full disk
            path.unlink(missing_ok=True)
            return "cannot be written"
        return None

    def num_bytes(self) -> int:
        """Bytes of the unread shards of all engines of the spool."""
        total = 0
        for path in self.folder.parent.glob("*/features/*.safetensors"):
            with suppress(OSError):  # the trainer may have read it in the meantime
                total += path.stat().st_size
        return total

    def shards(self) -> list[Path]:
        """Return the waiting shards, oldest first. The description of each lies beside it, with the suffix .json."""
        return [path.with_suffix(".safetensors") for path in sorted(self.features.glob(f"{'[0-9]' * 9}.json"))]
