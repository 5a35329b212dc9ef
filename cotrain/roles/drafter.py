"""The drafter trainer as a role of a run: its Ray actor, and the plain calls that the loop makes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from cotrain.config.schema import RunConfig
from cotrain.process import threads
from cotrain.process.cluster import Cluster, Placement
from cotrain.records import FeatureShard, WeightPayload
from cotrain.roles.actors import enter_process
from cotrain.trainer.trainer import DrafterTrainer, FreshScores
from drafters.base import Serving


class DrafterActor:
    """The drafter trainer in its own process."""

    def __init__(self, log_file: str, arguments: dict[str, Any]):
        enter_process(log_file)
        self._arguments = arguments

    def start(self) -> Serving:
        """Build or load the drafter; how engines serve it. Ray would bury an error in __init__ under its own."""
        self._trainer = DrafterTrainer(**self._arguments)
        return self._trainer.drafter.serving

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer."""
        return getattr(self._trainer, method)(*args)


class DrafterTraining:
    """The drafter trainer. `start_training` returns at once; all other methods wait."""

    def __init__(
        self, cluster: Cluster, config: RunConfig, model_path: Path, init_folder: Path | None, placement: Placement
    ):
        self._cluster, self._dtype = cluster, getattr(torch, config.rollout.dtype)
        arguments = {
            "config": config.drafter,
            "rollout": config.rollout,
            "model_path": str(model_path),
            "init_folder": None if init_folder is None else str(init_folder),
            "total_steps": config.steps,
            "seed": config.seed,
            "device": placement.device,
        }
        self._actor = cluster.start(
            DrafterActor,
            cluster.log_file("drafter"),
            arguments,
            environment=threads.openmp_environment(threads.num_cores()),
            gpus=placement.gpus,
        )
        self.serving: Serving = cluster.get(self._actor.start.remote())

    def take_in(
        self, shards: list[FeatureShard], serving: int, keep: Collection[int]
    ) -> tuple[FreshScores, dict[str, float]]:
        """See DrafterTrainer.take_in."""
        return self._call("take_in", shards, serving, keep)

    def start_training(self, step: int) -> Any:
        """Begin a training round; `finish_training` waits for it and has its metrics."""
        return self._actor.call.remote("train", step)

    def finish_training(self, training: Any) -> dict[str, float]:
        return self._cluster.get(training)

    def set_target_weights(self, payload: WeightPayload, policy_version: int) -> None:
        """Hand over the head and embedding of a policy version."""
        self._call("set_target_weights", payload.path, policy_version)

    def publish(self, path: Path, weights_of: int | None = None) -> tuple[WeightPayload, int]:
        """Freeze the current weights, or those of an earlier publication, as the next version, for the engines."""
        version = self._call("publish", weights_of)
        return self.write_payload(path, version), version

    def write_payload(self, path: Path, version: int) -> WeightPayload:
        """Write a publication for the engines, in their number format."""
        return self._call("write_payload", path, self._dtype, version)

    def save_checkpoint(self, folder: Path, version: int) -> None:
        """Write a publication as the folder that vLLM serves, in the number format of the engines."""
        self._call("save_checkpoint", folder, self._dtype, version)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, buffer and random state."""
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        """Continue from `save`."""
        self._call("load", folder)

    def _call(self, method: str, *args: Any) -> Any:
        return self._cluster.get(self._actor.call.remote(method, *args))
