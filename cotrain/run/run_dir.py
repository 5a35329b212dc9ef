"""The folder of one run: names every path in it, refuses a used name, and keeps two processes out of one run.

runs/NAME/
  config.json  provenance.json  metrics.jsonl  decisions.jsonl
  logs/attempt_1/  logs/latest -> attempt_1        one attempt per start or resume
  samples/step_000040.jsonl
  checkpoints/step_000040/{policy, drafter, state.json, COMPLETE}
  drafters/v0007/
"""

import difflib
import os
import re
import shlex
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from cotrain.config.files import list_runs
from cotrain.config.schema import RunConfig


class RunDir:
    """Paths of one run. Holds the run's lock from creation to close(); usable as a context manager."""

    def __init__(self, root: Path, name: str) -> None:
        """Open a folder that exists. Raises ValueError naming the process that runs it already."""
        self.name = name
        self.path = root / name
        self.config = self.path / "config.json"
        self.provenance = self.path / "provenance.json"
        self.metrics, self.decisions = self.path / "metrics.jsonl", self.path / "decisions.jsonl"
        self.logs = self.path / "logs" / "latest"
        self.checkpoints, self.samples, self.drafters = (
            self.path / folder for folder in ("checkpoints", "samples", "drafters")
        )
        self.resume = resume_arguments(root, name)
        """The arguments of `cotrain train` and `cotrain init` that continue this run."""
        self._lock, self._pid_file = FileLock(self.path / "run.lock"), self.path / "run.pid"
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            pid = self._pid_file.read_text().strip() if self._pid_file.exists() else "unknown"
            raise ValueError(
                f"name: run {name!r} is being run by process {pid}; stop that process or choose another name=..."
            ) from None
        self._pid_file.write_text(f"{os.getpid()}\n")

    @classmethod
    def create(cls, root: Path, name: str) -> Self:
        """Start a run. Raises ValueError when the name is used or unusable, or run_root cannot be written."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"name: {name!r} is no folder name; use letters, digits, '.', '_' and '-'")
        if (root / name).exists():
            raise ValueError(
                f"name: run {name!r} is already in {root}; continue it with {resume_arguments(root, name)} or choose "
                "another name=..."
            )
        try:
            (root / name).mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"run_root: cannot create {root / name} ({error.strerror}); set run_root=...") from None
        return cls(root, name)

    @classmethod
    def open(cls, root: Path, name: str) -> Self:
        """Continue a run. Raises ValueError listing the runs that exist."""
        runs = list_runs(root)
        if name not in runs:
            close = difflib.get_close_matches(name, runs, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            listed = f"it holds {', '.join(runs)}" if runs else "it holds no runs"
            raise ValueError(f"--resume: no run {name!r} in {root} ({listed}){hint}")
        return cls(root, name)

    def close(self) -> None:
        """Release the lock."""
        self._pid_file.unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def checkpoint(self, step: int) -> Path:
        """Checkpoint saved after `step`."""
        return self.checkpoints / f"step_{step:06d}"

    def samples_file(self, step: int) -> Path:
        """Rollouts of `step` as text, for reading."""
        return self.samples / f"step_{step:06d}.jsonl"

    def drafter(self, version: int) -> Path:
        """Published drafter, as stock vLLM serves it."""
        return self.drafters / f"v{version:04d}"

    def start_attempt(self) -> Path:
        """Make the next logs/attempt_N and point logs/latest at it. Returns the new folder."""
        logs = self.path / "logs"
        attempt = logs / f"attempt_{len(list(logs.glob('attempt_*'))) + 1}"
        attempt.mkdir(parents=True)
        self.logs.unlink(missing_ok=True)
        self.logs.symlink_to(attempt.name)
        return attempt


def resume_arguments(root: Path, name: str) -> str:
    """The arguments that continue a run: its name, and the run root where that is not the default."""
    default = RunConfig.model_fields["run_root"].default
    return f"--resume {name}" if root == default else f"--resume {name} run_root={shlex.quote(str(root))}"
