"""The spool: the folder through which a host's engines and the trainer beside them exchange files (docs/sidecar.md).
A file gets its name only when it is complete. A host's processes use this module, so it imports only the standard library.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

VARIABLE, HOST_VARIABLE = "COTRAIN_SIDECAR", "COTRAIN_HOST"
"""Environment variables with the spool's folder and the host's name. Without the first, cotrain does nothing in an engine."""


@dataclass(frozen=True)
class Settings:
    """Settings of the trainer that hold for every engine."""

    model: str  # the policy, as the host names it
    model_path: str  # the folder that this name stands for
    speculative_config: dict[str, Any]  # vLLM's own argument
    aux_layers: tuple[int, ...]
    share: float  # share of the requests that are tapped, 0 to 1
    max_bytes: int  # most bytes of shards that the trainer has not read; others are dropped
    adaptive: bool  # choose the draft length by measured speed, instead of always drafting as many tokens as possible
    replicas: bool  # may several hosts use this spool?


def write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """Return the content of a file, or None if there is no such file. Raises ValueError if it is not JSON."""
    with suppress(FileNotFoundError):
        return json.loads(path.read_text())


class Spool:
    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.initial, self.current = self.folder / "initial", self.folder / "drafter" / "current.json"
        self._settings, self._owner = self.folder / "settings.json", self.folder / "owner"

    def create(self, settings: Settings) -> None:
        """Make the folder, which no other user may read, and write the settings. From then on `is_alive` is True."""
        self.current.parent.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        write_json(self._settings, asdict(settings))
        self._lock = (self.folder / "trainer").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def settings(self) -> Settings:
        """Read the settings. Raises ValueError when there are none, or when another version of cotrain wrote them."""
        try:
            values = read_json(self._settings)
            return Settings(**{**values, "aux_layers": tuple(values["aux_layers"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self._settings} cannot be read: {error}") from error

    def abandon(self) -> None:
        """Release the lock, so that engines behave as if the trainer were gone and tap no more requests."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def is_alive(self) -> bool:
        """Whether the trainer is alive. It holds a lock, which the system releases when the trainer's process ends."""
        with suppress(OSError), (self.folder / "trainer").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def other_owner(self, host: str) -> dict[str, Any] | None:
        """Make `host` the owner of the spool and return None. If another host that lives owns it, return its {"host", "pid"}."""
        with (self.folder / "claims").open("w") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            owner: dict[str, Any] | None = read_json(self._owner)
            if owner is not None and Path(f"/proc/{owner['pid']}").exists():
                return owner if owner["host"] != host else None
            write_json(self._owner, {"host": host, "pid": os.getpid()})
            return None

    def add_verdict(self, verdict: dict[str, Any]) -> None:
        """Record whether an engine was adopted, as `verdicts` returns it. Raises OSError when it cannot be written."""
        folder = self.folder / "verdicts"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{time.time_ns()}.json", verdict)

    def verdicts(self) -> list[dict[str, Any]]:
        """Return {"model", "pid", "reason"} for each engine that looked for the trainer; reason is None if it was adopted."""
        return [read_json(path) for path in sorted(self.folder.glob("verdicts/*.json"))]

    def engine(self, instance_id: str) -> "EngineFolder":
        """Make the part of the spool that one engine writes."""
        engine = EngineFolder(self.folder / "engines" / instance_id)
        for folder in (engine.policies, engine.features):
            folder.mkdir(parents=True, exist_ok=True)
        return engine

    def engines(self) -> list["EngineFolder"]:
        """Return the folders of all engines that have written facts.json, whether they are attached or not."""
        return [EngineFolder(facts.parent) for facts in sorted(self.folder.glob("engines/*/facts.json"))]


class EngineFolder:
    def __init__(self, folder: Path):
        self.facts, self.state, self.policies = folder / "facts.json", folder / "state.json", folder / "policy"
        self.features, self._numbers = folder / "features", count()

    def add_shard(self, write: Callable[[Path], None], described: Any, num_bytes: int, max_bytes: int) -> str | None:
        """Write a shard of num_bytes with `write`, then its description. Return why it was dropped, or None.

        All engines of a spool share max_bytes. A shard is also dropped when the disk is full or the spool is gone.
        """
        path = self.features / f"{next(self._numbers):09d}.safetensors"
        try:
            for shard in self.features.parent.parent.glob("*/features/*.safetensors"):
                with suppress(OSError):  # the trainer may have read it in the meantime
                    num_bytes += shard.stat().st_size
            if num_bytes > max_bytes:
                return "spool full"
            write(path)
            write_json(path.with_suffix(".json"), described)
        except Exception:  # safetensors has an exception of its own for a full disk
            path.unlink(missing_ok=True)
            return "cannot be written"
        return None

    def shards(self) -> list[Path]:
        """Return the waiting shards, oldest first. The description of each lies beside it, with the suffix .json."""
        return [path.with_suffix(".safetensors") for path in sorted(self.features.glob("*.json"))]
