"""The drafter trainer in a process of its own, and its client. See DrafterTrainer for what the calls do."""

from collections.abc import Collection
from functools import partial
from pathlib import Path

from cotrain.actors.learner import Learner, LearnerActor, Pending
from cotrain.config.schema import RunConfig
from cotrain.process.cluster import Cluster
from cotrain.process.threads import openmp_environment
from cotrain.publish.evidence import FreshScores
from cotrain.records import WeightPayload
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.nodes import Nodes
from drafters.base import ServingSpec


class DrafterActor(LearnerActor):
    """The drafter trainer; the name is the process's title."""


class Drafter(Learner[DrafterTrainer]):
    """Client of the drafter trainer."""

    def serving(self) -> ServingSpec:
        return self._call(DrafterTrainer.serving)

    def begin_set_target_weights(self, path: str, policy_version: int) -> Pending[None]:
        return self._begin(DrafterTrainer.set_target_weights, path, policy_version)

    def take_in(
        self, features: list[str], serving: int, keep: Collection[int], judged: int
    ) -> tuple[FreshScores, dict[str, float]]:
        return self._call(DrafterTrainer.take_in, features, serving, keep, judged)

    def begin_train(self, step: int, num_updates: int) -> Pending[dict[str, float]]:
        return self._begin(DrafterTrainer.train, step, num_updates)

    def publish(self, weights_of: int | None = None) -> int:
        return self._call(DrafterTrainer.publish, weights_of)

    def save_checkpoint(self, folder: Path, version: int) -> None:
        self._call(DrafterTrainer.save_checkpoint, folder, version)

    def write_payload(self, path: Path, version: int) -> WeightPayload:
        return self._call(DrafterTrainer.write_payload, path, version)

    def begin_drop_earlier_versions(self) -> Pending[None]:
        return self._begin(DrafterTrainer.drop_earlier_versions)

    def begin_save(self, folder: Path) -> Pending[None]:
        return self._begin(DrafterTrainer.save, folder)

    def load(self, folder: Path) -> None:
        self._call(DrafterTrainer.load, folder)


def start_drafter(cluster: Cluster, nodes: Nodes, config: RunConfig, init_folder: Path | None) -> Drafter:
    """Begin to start a DrafterTrainer."""
    node = cluster.node_of["drafter"]
    actor = cluster.start(DrafterActor, "drafter", nodes.call(node, openmp_environment))
    create = partial(DrafterTrainer, trainer_spec(config), nodes.model_path, init_folder, cluster.device)
    return Drafter(cluster, [actor], node, create)
