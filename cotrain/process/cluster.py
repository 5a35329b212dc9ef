"""Which role runs where: the only code that starts Ray and places actors on it."""

import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.config.schema import ClusterConfig, RunConfig
from cotrain.process.failures import RoleFailure, RunFailure

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves the engine beside anything else
    "RAY_prestart_worker_first_driver": "0",  # our actors have environments of their own, for which none is ready
    "RAY_enable_worker_prestart": "0",
}
"""Ray reads these when it is imported."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Room for rollouts and metrics; weights and features travel as files in shared memory."""

STARTING_FACTOR = 4
"""A role's first answer may take so many times cluster.hang_after_s, because it loads a model."""


@dataclass(frozen=True)
class Placement:
    """Where the roles run."""

    device: str
    gpus: float
    """GPUs of each process, possibly a share of one; 0 on CPU."""


def place(config: RunConfig, num_gpus: int) -> Placement:
    """Give every process a GPU of its own if there are enough; else all share.

    Raises ValueError when the configuration asks for a GPU and there is none.
    """
    device = config.cluster.device
    if device == "cuda" and num_gpus == 0:
        raise ValueError('cluster.device = "cuda", but there is no GPU; use "auto" or "cpu"')
    if device == "cpu" or num_gpus == 0:
        return Placement("cpu", 0)
    processes = config.rollout.num_engines + config.policy.num_processes + (config.drafter is not None)
    if num_gpus >= processes:
        return Placement("cuda", 1)
    # Whole processes on each GPU, so that none is split over two.
    return Placement("cuda", int(1000 / math.ceil(processes / num_gpus)) / 1000)


def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    """A private Ray that takes orders from one run alone, and the actors of that run."""

    def __init__(self, config: ClusterConfig, logs: Path, resume: str = "--resume"):
        """Start Ray. resume: the arguments that continue the run, for messages."""
        self._config, self._logs, self._resume = config, logs, resume
        self._actors: list[Any] = []
        self._log_files: dict[str, str] = {}  # by actor id
        self._answered: set[str] = set()  # actor ids
        for name, value in RAY_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Without a token in the environment, Ray writes one for all of the user's runs into the home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray

        self._ray = ray
        on_sigterm = signal.getsignal(signal.SIGTERM)
        self._start_ray()
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler would end a run in the middle of a step
        self.num_gpus = int(ray.cluster_resources().get("GPU", 0))

    def _start_ray(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it asks for a token
        self._ray.init(
            address="local",
            num_cpus=64,  # logical: the roles take turns on the cores, see threads.py
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            _node_ip_address="127.0.0.1",
        )

    def log_file(self, role: str) -> str:
        """Where a role's process writes."""
        return str((self._logs / f"{role}.log").resolve())

    def start(
        self,
        actor_class: type,
        log_file: str,
        *args: Any,
        environment: dict[str, str],
        gpus: float = 0,
        **options: Any,
    ) -> Any:
        """Start the actor actor_class(log_file, *args).

        It is never restarted and no call is repeated, since a training step must not be made twice.
        """
        remote = self._ray.remote(actor_class).options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": environment},
            **options,
        )
        actor = remote.remote(log_file, *args)
        self._actors.append(actor)
        self._log_files[actor._actor_id.hex()] = log_file
        return actor

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        """Wait for a result (or a list of them); an actor's exception is raised as its own type.

        Raises RoleFailure naming the role and its log when its process has died (at once), or has not answered within
        `timeout` seconds (default: cluster.hang_after_s).
        """
        references = reference if isinstance(reference, list) else [reference]
        actors = {_actor_of(r) for r in references}
        if timeout is None:
            timeout = self._config.hang_after_s * (1 if actors <= self._answered else STARTING_FACTOR)
        errors = self._ray.exceptions
        try:
            result = self._ray.get(reference, timeout=timeout)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, RunFailure):
                raise self._failure(actors, str(cause)) from None
            raise cause from None
        except errors.GetTimeoutError:
            _, waiting = self._ray.wait(references, num_returns=len(references), timeout=0)
            hung = (
                f"no answer for {timeout:.0f} s, so it counts as hung (raise cluster.hang_after_s if it only is slow)"
            )
            raise self._failure({_actor_of(r) for r in waiting}, hung) from None
        except errors.RayActorError as error:
            if error.actor_init_failed:
                raise
            died = {error.actor_id} if error.actor_id in self._log_files else actors
            raise self._failure(died, "its process has died: killed from outside, or out of memory") from error
        self._answered |= actors
        return result

    def _failure(self, actors: Collection[str], what: str) -> RoleFailure:
        logs = [self._log_files[actor] for actor in sorted(actors) if actor in self._log_files]
        roles = " and ".join(Path(log).stem for log in logs) or "an actor"
        return RoleFailure(
            f"{roles}: {what}. Look into {', '.join(logs) or self._logs}. What was saved is whole: continue with "
            f"{self._resume}"
        )

    def stop(self) -> None:
        """Kill all actors (what they started dies with them, see orphans.py), and Ray itself."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()


def _actor_of(reference: Any) -> str:
    """Id of the actor that a reference waits for."""
    return reference.task_id().actor_id().hex()
