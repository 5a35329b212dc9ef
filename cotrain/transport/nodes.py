"""Nodes of a run. A role reads and writes files in its own node's shared memory; `bring` copies them to other nodes.

Files go from the agent of one node to that of another, several at a time, and never through the controller's process.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotrain.models.loading import resolve_model
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import scratch_folder
from cotrain.run.checkpoint import model_fingerprints
from cotrain.run.provenance import differing_versions, package_versions

PART_BYTES = 64 * 2**20  # bytes of a part of a file. Of each file, two parts are in the object store at once.

PULLS = 4
"""Files that a node takes in at once. They have threads of their own, because the calls that they wait for run meanwhile."""


class NodeAgent:
    """Keeps a node's folder in shared memory, and calls functions on that node."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def folder(self, run: str) -> Path:
        """Make the folder. run: the run's name, which becomes part of the folder's name."""
        return self._stack.enter_context(scratch_folder(run))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on this node, and return its result."""
        return function(*args)

    def pull(self, source: Any, path: str, target: str, move: bool) -> None:
        """Copy a file from the node of the agent `source` to this one. It gets its name when it is whole. move: delete the original."""
        import ray

        size = ray.get(source.call.remote(os.path.getsize, path))
        following, partial = source.call.remote(read_part, path, 0), Path(f"{target}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for end in range(PART_BYTES, size + PART_BYTES, PART_BYTES):
                part = following
                if end < size:  # is read while this part is written
                    following = source.call.remote(read_part, path, end)
                ray.get(part).tofile(file)
        os.replace(partial, target)
        if move:
            ray.get(source.call.remote(Path.unlink, Path(path), True))

    def close(self) -> None:
        """Remove the folder."""
        self._stack.close()


def read_part(path: str, start: int) -> NDArray[np.uint8]:
    """Return PART_BYTES of a file from byte `start` on, or fewer at its end."""
    return np.fromfile(path, np.uint8, PART_BYTES, offset=start)


def _model(name: str) -> tuple[Path, dict[str, str]]:
    folder = resolve_model(name)
    return folder, model_fingerprints(folder)


class Coming(NamedTuple):
    """A file on its way to a node."""

    path: str  # where it will be
    reference: Any  # Ray's reference of the call that copies it; None if it is there already


class Nodes:
    """The nodes that the roles of a run were placed on, by Ray's node id."""

    def __init__(self, cluster: Cluster, run: str):
        """Start an agent on every node, if there are several. The folder of the controller's own node is that of the cluster."""
        self._cluster, self.local = cluster, cluster.local_node
        others = set(cluster.node_of.values()) - {self.local}
        started = [*others, self.local] if others else []
        self._agents = {
            node: cluster.start_agent(NodeAgent, node, concurrency_groups={"pulls": PULLS}) for node in started
        }
        folders = cluster.get([self._agents[node].folder.remote(run) for node in others])
        self.scratch: dict[str, Path] = {self.local: cluster.scratch} | dict(zip(others, folders, strict=True))
        self.model_path = Path()  # folder of the policy's model, the same on all nodes; `check` sets it

    def call(self, node: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on a node, and wait for its result."""
        if node == self.local:
            return function(*args)
        [result] = self._cluster.get([self._agents[node].call.remote(function, *args)])
        return result

    def check(self, marker: Path, model: str) -> None:
        """Find the model on every node. Refuse nodes with other software or another model, or without the run's folder.

        marker: a file in the run's folder. Raises RunFailure naming the nodes and what to do.
        """
        self.model_path, fingerprints = _model(model) if self._agents else (resolve_model(model), {})
        versions = {self._cluster.node_name(node): self.call(node, package_versions) for node in self.scratch}
        problems = [f"{line}; install the same version on each" for line in differing_versions(versions)]
        for node in sorted(self.scratch.keys() - {self.local}):
            name = self._cluster.node_name(node)
            if not self.call(node, Path.is_file, marker):
                problems.append(f"{name} does not see {marker.parent}; set run_root to a folder that all nodes share")
            try:
                if self.call(node, _model, model) != (self.model_path, fingerprints):
                    problems.append(f"{name} has another policy.model, or elsewhere; copy {self.model_path} there")
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise RunFailure("not all nodes can take part:\n  " + "\n  ".join(problems))

    def begin_bring(self, path: str, node: str, move: bool = False) -> Coming:
        """Begin to copy a file to a node unless it is there; `arrived` waits for it. move: delete the original."""
        source = self._node_of(path)
        if source == node:
            return Coming(path, None)
        target = str(self.scratch[node] / f"from-{source[:8]}" / Path(path).relative_to(self.scratch[source]))
        pull = self._agents[node].pull.options(concurrency_group="pulls")
        return Coming(target, pull.remote(self._agents[source], path, target, move))

    def arrived(self, coming: Coming) -> str:
        """Return the path of a file once it is there. Raises RunFailure if a node is gone."""
        if coming.reference is not None:
            self._cluster.get([coming.reference])
        return coming.path

    def bring(self, path: str, node: str, move: bool = False) -> str:
        """Copy a file to a node unless it is there, and return its path there. move: delete the original. Raises RunFailure."""
        return self.arrived(self.begin_bring(path, node, move))

    def remove_all(self, paths: Iterable[str]) -> None:
        """Delete files on whichever nodes they are; they may already be gone."""
        for path in paths:
            self.call(self._node_of(path), Path.unlink, Path(path), True)

    def close(self) -> None:
        """Remove the folders of all other nodes that are still there."""
        for agent in self._agents.values():
            with suppress(RunFailure):
                self._cluster.get([agent.close.remote()])

    def _node_of(self, path: str) -> str:
        return next(node for node, folder in self.scratch.items() if Path(path).is_relative_to(folder))
