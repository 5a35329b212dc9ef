"""A Ray cluster of two nodes on loopback."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from cotrain.process.cluster import RAY_ENVIRONMENT


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes, and the second of them."""
    os.environ.update(RAY_ENVIRONMENT)
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 128 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **store})
    yield cluster, cluster.add_node(num_cpus=3, **store)
    cluster.shutdown()


@pytest.fixture(scope="module")
def address(two_nodes: tuple[Any, Any]) -> str:
    return two_nodes[0].address
