"""Nodes of a run. A role reads and writes files in its own node's shared memory; `bring` copies them to other nodes."""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotrain.models.loading import resolve_model
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import scratch_folder
from cotrain.run.checkpoint import model_fingerprints
from cotrain.run.provenance import differing_versions, package_versions

PART_BYTES = 256 * 2**20  # bytes of a file that are in the object store at once


class NodeAgent:
    """Keeps a node's folder in shared memory, and calls functions on that node."""

    def __init__(self, run: str):
        """run: the run's name, which becomes part of the folder's name."""
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(scratch_folder(run))

    def folder(self) -> Path:
        return self._folder

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on this node, and return its result."""
        return function(*args)

    def close(self) -> None:
        """Remove the folder."""
        self._stack.close()


def read_part(path: str, start: int) -> NDArray[np.uint8]:
    """Return PART_BYTES of a file from byte `start` on, or fewer at its end."""
    return np.fromfile(path, np.uint8, PART_BYTES, offset=start)


def write_part(path: str, start: int, part: NDArray[np.uint8], last: bool) -> None:
    """Write a part at its place. The file gets its name with the last part."""
    partial = Path(f"{path}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("r+b" if start else "wb") as file:
        file.seek(start)
        part.tofile(file)
    if last:
        os.replace(partial, path)


def _model(name: str) -> tuple[Path, dict[str, str]]:
    folder = resolve_model(name)
    return folder, model_fingerprints(folder)


class Nodes:
    """The nodes that the roles of a run were placed on, by Ray's node id."""

    def __init__(self, cluster: Cluster, run: str):
        """Start an agent on every other node. The folder of the controller's own node is that of the cluster."""
        self._cluster, self.local = cluster, cluster.local_node
        others = set(cluster.node_of.values()) - {self.local}
        self._agents = {node: cluster.start_agent(NodeAgent, node, run) for node in others}
        folders = cluster.get([agent.folder.remote() for agent in self._agents.values()])
        self.scratch: dict[str, Path] = {self.local: cluster.scratch} | dict(zip(self._agents, folders, strict=True))
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
        for node in self._agents:
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

    def bring(self, path: str, node: str, move: bool = False) -> str:
        """Copy a file to a node unless it is there, and return its path there. move: delete the original. Raises RunFailure."""
        source = self._node_of(path)
        if source == node:
            return path
        target = str(self.scratch[node] / f"from-{source[:8]}" / Path(path).relative_to(self.scratch[source]))
        size = self.call(source, os.path.getsize, path)
        for start in range(0, max(size, 1), PART_BYTES):
            if self.local in (source, node):
                part: Any = self.call(source, read_part, path, start)
            else:  # a reference, so that the data go from node to node and not through this process
                part = self._agents[source].call.remote(read_part, path, start)
            self.call(node, write_part, target, start, part, start + PART_BYTES >= size)
        if move:
            self.remove_all([path])
        return target

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
