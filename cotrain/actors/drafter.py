"""The drafter trainer in a process of its own, and its client. See DrafterTrainer for what the calls do."""

from collections.abc import Collection
from functools import partial
from pathlib import Path

from cotrain.actors.learner import Learner, LearnerActor
from cotrain.config.schema import RunConfig
from cotrain.process.cluster import Cluster, engine_device
from cotrain.process.threads import openmp_environment
from cotrain.publish.evidence import FreshScores
from cotrain.records import WeightPayload
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.nodes import Nodes

RETURN_FREED = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(4 * 2**20))
"""Settings of glibc: blocks of that many bytes go back to the system when they are freed. By itself it keeps those of up to 32 MiB. A
drafter's step frees many below that, between others that stay, and a fifth of its peak memory was holes (benchmarks/drafter_memory.py)."""


class DrafterActor(LearnerActor):
    """The drafter trainer; the name is the process's title."""


class Drafter(Learner[DrafterTrainer]):
    """Client of the drafter trainer, with what the publisher calls of a DrafterTrainer."""

    def take_in(
        self, features: list[str], serving: int, keep: Collection[int], judged: int
    ) -> tuple[FreshScores, dict[str, float]]:
        return self.call(DrafterTrainer.take_in, features, serving, keep, judged)

    def publish(self, weights_of: int | None = None) -> int:
        return self.call(DrafterTrainer.publish, weights_of)

    def write_payload(self, path: Path, version: int) -> WeightPayload:
        return self.call(DrafterTrainer.write_payload, path, version)


def start_drafter(cluster: Cluster, nodes: Nodes, config: RunConfig, init_folder: Path | None) -> Drafter:
    """Begin to start a DrafterTrainer."""
    node = cluster.node_of["drafter"]
    actor = cluster.start(DrafterActor, "drafter", nodes.call(node, openmp_environment) | RETURN_FREED)
    create = partial(DrafterTrainer, trainer_spec(config), nodes.model_path, init_folder, engine_device())
    return Drafter(cluster, [actor], node, create)
