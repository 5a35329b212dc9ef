"""Which role runs where: the only code that starts Ray and places actors on it."""

import logging
import math
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.config.schema import ClusterConfig, RunConfig
from cotrain.process.failures import RoleFailure, RunFailure
from cotrain.process.orphans import start_reaper
from cotrain.process.scratch import scratch_folder

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 starves the engine beside anything else

OBJECT_STORE_BYTES = 256 * 2**20
"""Rollouts and metrics only: weights and features travel as files in shared memory."""

HANG_AFTER_S = 1800.0
"""A role that has not answered a call for so long counts as hung. A dead one is noticed at once."""

STARTING_FACTOR = 4
"""How many times as long a role's first answer may take: it loads a model."""

JOIN_TIMEOUT_S = 60.0
"""For a first task on a cluster that a run joins."""


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
        raise ValueError('cluster.device = "cuda", but there is no GPU; use "auto" or "cpu"')
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

    def __init__(self, config: ClusterConfig, logs: Path, resume: str = "--resume", hang_after_s: float = HANG_AFTER_S):
        """Start a private Ray that takes orders from this run alone, or join config.address.

        Raises ValueError when that does not answer, or is not this machine alone.
        resume: the arguments that continue the run, for messages.
        """
        self._logs = logs
        self._resume = resume
        self._hang_after_s = hang_after_s
        private = config.address is None
        self._reaper: subprocess.Popen[bytes] | None = None
        if private:
            # Ray asks for a token by default. Without one in the environment it would write one for all of the user's
            # runs into the home folder.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            self._reaper = start_reaper()
        import ray

        self._ray = ray
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if private:
            logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it asks for a token
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
            if problem := self._not_this_machine():
                ray.shutdown()
                raise ValueError(
                    f"cluster.address: the Ray cluster at {config.address} {problem}, but weights and hidden states "
                    "travel through the shared memory of one machine; join a cluster of this machine alone (ray start "
                    "--head), or leave cluster.address out for a private one"
                )
        self.num_gpus = int(ray.cluster_resources().get("GPU", 0))
        self._actors: list[Any] = []
        self._log_files: dict[str, str] = {}  # by actor id
        self._answered: set[str] = set()  # actor ids

    def _not_this_machine(self) -> str | None:
        """Why files in shared memory would not reach every actor of the joined cluster; None when they do."""
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        if nodes > 1:
            return f"has {nodes} nodes"
        look = self._ray.remote(lambda path: os.path.exists(path)).options(num_cpus=0)
        with scratch_folder("join") as folder:
            try:
                seen = self._ray.get(look.remote(str(folder)), timeout=JOIN_TIMEOUT_S)
            except self._ray.exceptions.GetTimeoutError:
                return f"has not run a first task in {JOIN_TIMEOUT_S:.0f} s"
        return None if seen else "does not see the shared memory of this process"

    def log_file(self, role: str) -> str:
        """Where a role's process writes."""
        return str((self._logs / f"{role}.log").resolve())

    def start(self, actor_class: type, *args: Any, environment: dict[str, str], gpus: float = 0, **options: Any) -> Any:
        """Start one actor; one of `args` is its `log_file`.

        Trainers are never restarted or retried: they resume from a checkpoint instead.
        """
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
        self._log_files[actor._actor_id.hex()] = next(a for a in args if isinstance(a, str) and a.endswith(".log"))
        return actor

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        """Wait for a result (or a list of them); an actor's exception is raised as its own type.

        Raises RoleFailure naming the role and its log when its process has died (at once), or has not answered within
        `timeout` seconds (default: hang_after_s).
        """
        references = reference if isinstance(reference, list) else [reference]
        actors = {_actor_of(r) for r in references}
        if timeout is None:
            timeout = self._hang_after_s * (1 if actors <= self._answered else STARTING_FACTOR)
        errors = self._ray.exceptions
        try:
            result = self._ray.get(reference, timeout=timeout)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, RunFailure):
                raise self._failure(sorted(actors), str(cause)) from None
            raise cause from None
        except errors.GetTimeoutError:
            _, waiting = self._ray.wait(references, num_returns=len(references), timeout=0)
            silent = {_actor_of(r) for r in waiting}
            what = (
                f"no answer for {timeout:.0f} s, so it counts as hung (raise cluster.hang_after_s if it only is slow)"
            )
            raise self._failure(sorted(silent), what) from None
        except errors.RayActorError as error:
            if error.actor_init_failed:
                raise
            died = [error.actor_id] if error.actor_id in self._log_files else sorted(actors)
            raise self._failure(died, "its process has died: killed from outside, or out of memory") from error
        self._answered |= actors
        return result

    def _failure(self, actors: Sequence[str], what: str) -> RoleFailure:
        logs = [self._log_files[actor] for actor in actors if actor in self._log_files]
        roles = " and ".join(Path(log).stem for log in logs) or "an actor"
        return RoleFailure(
            f"{roles}: {what}. Look into {', '.join(logs) or self._logs}. What was saved is whole: continue with "
            f"{self._resume}"
        )

    def stop(self) -> None:
        """Kill all actors (what they started dies with them, see orphans.py), and Ray itself when it is ours."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            self._reaper.wait()


def _actor_of(reference: Any) -> str:
    """Id of the actor that a reference waits for."""
    return reference.task_id().actor_id().hex()
