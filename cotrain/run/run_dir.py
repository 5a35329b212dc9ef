"""The folder of one run: all paths in it (docs/guide/running.md), and a lock that keeps other processes out of the run."""

import shlex
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from cotrain.config.schema import default_run_root

FAILURE = "failure.txt"  # file beside the logs of an attempt that failed, with the reason


class RunDir(AbstractContextManager["RunDir"]):
    """Paths of one run, hence an attribute for each file. Holds the run's lock from creation to close()."""

    def __init__(self, root: Path, name: str, resumed: bool = True) -> None:
        """Open the folder of a run or, unless it is resumed, make it. Raises ValueError when another process runs it, or when
        a new folder cannot be made or is there already."""
        self.path, self.resumed = root / name, resumed
        if not resumed:
            try:
                self.path.mkdir(parents=True)
            except OSError as error:
                raise ValueError(
                    f"run_root: cannot make {self.path} ({error.strerror}); set run_root or name"
                ) from None
        self.config, self.provenance = self.path / "config.json", self.path / "provenance.json"
        self.metrics, self.decisions = self.path / "metrics.jsonl", self.path / "decisions.jsonl"
        self.stream, self.steps = self.path / "stream.jsonl", self.path / "steps.jsonl"
        self.logs = self.path / "logs" / "latest"
        self.checkpoints = self.path / "checkpoints"
        self.resume = resume_arguments(root, name)
        """The arguments of `cotrain train` that continue this run."""
        self.stopped = f"stopped at once; what was saved is whole: go on with {self.resume}"  # for a stop by signal
        self._lock = FileLock(self.path / "run.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"name: run {name!r} is being run by another process; stop that process or choose another name=..."
            ) from None

    def close(self) -> None:
        self._lock.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close()
        if kind in (KeyboardInterrupt, SystemExit):
            print(self.stopped, flush=True)
        elif error is not None:
            with suppress(OSError):  # a full disk, or a failure before there was an attempt
                (self.logs / FAILURE).write_text(str(error))

    def checkpoint(self, step: int) -> Path:
        """Checkpoint saved after `step`."""
        return self.checkpoints / f"step_{step:06d}"

    def samples_file(self, step: int) -> Path:
        """Rollouts of `step` as text, for reading."""
        return self.path / "samples" / f"step_{step:06d}.jsonl"

    def drafter(self, version: int) -> Path:
        """Published drafter, as stock vLLM serves it."""
        return self.path / "drafters" / f"v{version:04d}"

    def end_with_drafter(self, version: int) -> Path:
        """Let the link `drafter` point to the drafter that serves at the end of a run. Returns the link."""
        link = self.path / "drafter"
        link.unlink(missing_ok=True)
        link.symlink_to(self.drafter(version).relative_to(self.path))
        return link

    @property
    def starts(self) -> Path:
        """Folder of the registered drafters that are tried with drafter.init = "auto"."""
        return self.path / "drafter_starts"

    def start_attempt(self) -> None:
        """Make the next logs/attempt_N and point logs/latest at it."""
        logs = self.path / "logs"
        attempt = logs / f"attempt_{len(list(logs.glob('attempt_*'))) + 1}"
        attempt.mkdir(parents=True)
        self.logs.unlink(missing_ok=True)
        self.logs.symlink_to(attempt.name)


def resume_arguments(root: Path, name: str) -> str:
    """The arguments that continue a run: its name, and the run root where that is not the default."""
    return f"--resume {name}" if root == default_run_root() else f"--resume {name} run_root={shlex.quote(str(root))}"
