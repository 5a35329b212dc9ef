"""The drafter trainer as a role of a run: its Ray actor, and the plain calls that the loop makes."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

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

    def start(self) -> None:
        """Build or load the drafter. Not in __init__: Ray would bury an error under its own."""
        self._trainer = DrafterTrainer(**self._arguments)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer."""
        return getattr(self._trainer, method)(*args)

    def serving(self) -> Serving:
        """How engines serve the drafter."""
        return self._trainer.drafter.serving

    def take_in(
        self, shards: list[FeatureShard], serving: int, keep: Collection[int]
    ) -> tuple[FreshScores, dict[str, float]]:
        """Take in a step's features and score the drafters on them."""
        metrics = self._trainer.add_features(shards)
        started, cpu_started = time.perf_counter(), time.process_time()
        scores = self._trainer.score_fresh(serving, keep)
        metrics["drafter/score_s"] = time.perf_counter() - started
        metrics["drafter/score_cpu_s"] = time.process_time() - cpu_started
        return scores, metrics

    def save_checkpoint(self, folder: str, dtype: str, version: int) -> None:
        """Write the folder that vLLM serves."""
        import torch

        self._trainer.save_checkpoint(folder, getattr(torch, dtype), version)

    def write_payload(self, path: str, dtype: str, version: int) -> WeightPayload:
        """Write the weights of a publication for the engines."""
        import torch

        from cotrain.transport.payload import write_payload

        return write_payload(self._trainer.state_for_serving(version), path, getattr(torch, dtype))


class DrafterTraining:
    """The drafter trainer. A method named start_* returns at once; all others wait."""

    def __init__(
        self, cluster: Cluster, config: RunConfig, model_path: Path, init_folder: Path | None, placement: Placement
    ):
        self._cluster = cluster
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
        cluster.get(self._actor.start.remote())

    def serving(self) -> Serving:
        """How engines serve the drafter."""
        return self._cluster.get(self._actor.serving.remote())

    def take_in(
        self, shards: list[FeatureShard], serving: int, keep: Collection[int]
    ) -> tuple[FreshScores, dict[str, float]]:
        """Take in a step's features, and score on them the drafter in training and the one that the engines serve.

        Publications other than `serving` and `keep` are forgotten.
        """
        return self._cluster.get(self._actor.take_in.remote(shards, serving, keep))

    def start_training(self, step: int) -> Any:
        """Begin a session of training on the buffer."""
        return self._actor.call.remote("train", step)

    def finish_training(self, training: Any) -> dict[str, float]:
        """Wait for `start_training`."""
        return self._cluster.get(training)

    def set_target_weights(self, payload: WeightPayload, policy_version: int) -> None:
        """Hand over the head and embedding of a policy version."""
        self._cluster.get(self._actor.call.remote("set_target_weights", payload.path, policy_version))

    def publish(self, path: Path, dtype: str, weights_of: int | None = None) -> tuple[WeightPayload, int]:
        """Freeze the current weights, or those of an earlier publication, as the next version, for the engines."""
        version = self._cluster.get(self._actor.call.remote("publish", weights_of))
        return self.write_payload(path, dtype, version), version

    def write_payload(self, path: Path, dtype: str, version: int) -> WeightPayload:
        """Write a publication for the engines."""
        return self._cluster.get(self._actor.write_payload.remote(str(path), dtype, version))

    def save_checkpoint(self, folder: Path, dtype: str, version: int) -> None:
        """Write a publication as the folder that vLLM serves."""
        self._cluster.get(self._actor.save_checkpoint.remote(str(folder), dtype, version))

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, buffer and random state."""
        self._cluster.get(self._actor.call.remote("save", str(folder)))

    def load(self, folder: Path) -> None:
        """Continue from `save`."""
        self._cluster.get(self._actor.call.remote("load", str(folder)))
