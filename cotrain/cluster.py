"""Which role runs where: the only code that starts Ray and places actors on it."""

import math
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain import threads
from cotrain.config import ClusterConfig, RunConfig
from cotrain.orphans import start_reaper

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 starves the engine beside anything else

OBJECT_STORE_BYTES = 256 * 2**20
"""Rollouts and metrics only: weights and features travel as files in shared memory."""


@dataclass(frozen=True)
class Placement:
    """GPUs (possibly a share of one) of each process; all zero on CPU."""

    device: str
    engine_gpus: float
    learner_gpus: float
    drafter_gpus: float


def place(config: RunConfig, num_gpus: int) -> Placement:
    """Give every process a GPU of its own if there are enough; else all share.

    Raises ValueError when the configuration asks for a GPU and there is none.
    """
    device = config.cluster.device
    if device == "cuda" and num_gpus == 0:
        raise ValueError('cluster.device = "cuda", but Ray sees no GPU; use "auto" or "cpu"')
    if device == "cpu" or num_gpus == 0:
        return Placement("cpu", 0, 0, 0)
    processes = config.rollout.num_engines + config.policy.num_processes + (config.drafter is not None)
    if num_gpus >= processes:
        return Placement("cuda", 1, 1, 1)
    share = int(1000 / math.ceil(processes / num_gpus)) / 1000  # whole processes on each GPU: none is split over two
    return Placement("cuda", share, share, share)


def free_port() -> int:
    """A TCP port on loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    """Ray, started or joined, and the actors of one run."""

    def __init__(self, config: ClusterConfig, logs: Path):
        """Start a private Ray on loopback, or join config.address. Raises ValueError when it does not answer."""
        self._logs = logs
        self._cores = threads.num_cores()
        self._config = config
        private = config.address is None
        self._reaper: subprocess.Popen[bytes] | None = None
        if private:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only; read at import
            self._reaper = start_reaper()
        import ray

        self._ray = ray
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if private:
            ray.init(
                address="local",
                num_cpus=64,  # logical: the roles take turns on the cores, see threads.py
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **common,
            )
        else:
            try:
                ray.init(address=config.address, **common)
            except ConnectionError as error:
                raise ValueError(f"cluster.address: no Ray cluster at {config.address} ({error})") from error
        self.num_gpus = int(ray.cluster_resources().get("GPU", 0))
        self._actors: list[Any] = []

    def log_file(self, role: str) -> str:
        """Where a role's process writes."""
        return str((self._logs / f"{role}.log").resolve())

    def start(self, actor_class: type, *args: Any, environment: dict[str, str], gpus: float = 0, **options: Any) -> Any:
        """Start one actor. Trainers are never restarted or retried: they resume from a checkpoint instead."""
        remote = self._ray.remote(actor_class).options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": environment},
            **options,
        )
        actor = remote.remote(*args)
        self._actors.append(actor)
        return actor

    def engine_threads(self) -> int:
        """OpenMP threads of an engine: it generates while the learners wait, so all cores are its."""
        return self._config.engine_threads or self._cores

    def learner_threads(self) -> int:
        """OpenMP threads of a learner. Never depends on what else runs: sums would be rounded differently."""
        return self._config.learner_threads or self._cores

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        """Wait for a result (or a list of them); an actor's exception is raised as its own type."""
        try:
            return self._ray.get(reference, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def stop(self) -> None:
        """Kill all actors (what they started dies with them, see orphans.py), and Ray itself when it is ours."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper.wait()
