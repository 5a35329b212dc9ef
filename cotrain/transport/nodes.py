"""Nodes of a run: an agent on each keeps its folder in shared memory, and files get from one node to another.

A role reads and writes files of its own node. What another node needs goes there once, in parts, through Ray's object store.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.cluster import Cluster, free_port
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import scratch_folder
from cotrain.run.checkpoint import model_fingerprints
from cotrain.run.provenance import package_versions

PART_BYTES = 256 * 2**20
"""Bytes of a file that are in the object store at once."""


class NodeAgent:
    """What a run needs of one node."""

    def __init__(self, run: str):
        """run: the run's name, for the name of the folder."""
        self._stack = ExitStack()
        self.scratch = self._stack.enter_context(scratch_folder(run))

    def facts(self) -> tuple[Path, dict[str, str]]:
        """The node's folder in shared memory, and its versions of Python and of the packages that a run uses."""
        return self.scratch, package_versions()

    def environment(self, kind: Literal["engine", "learner", "rewards"], num_ranks: int = 1) -> dict[str, str]:
        """Environment of a role on this node. num_ranks: tensor-parallel processes of an engine."""
        if kind == "engine":
            return threads.engine_environment(threads.num_cores(), num_ranks)
        return threads.openmp_environment(1 if kind == "rewards" else threads.num_cores())

    def free_port(self) -> int:
        """A TCP port of this node that nothing listens on."""
        return free_port()

    def read_text(self, path: Path) -> str | None:
        """A small file, or None where this node has none of that name."""
        return path.read_text() if path.is_file() else None

    def model(self, name: str) -> tuple[Path, dict[str, str]]:
        """Where this node has the model called name, and its fingerprints. Raises ValueError as `resolve_model`."""
        folder = resolve_model(name)
        return folder, model_fingerprints(folder)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return Path(path).stat().st_size

    def read(self, path: str, start: int) -> NDArray[np.uint8]:
        """PART_BYTES of a file, or fewer at its end."""
        return np.fromfile(path, np.uint8, PART_BYTES, offset=start)

    def write(self, path: str, start: int, part: NDArray[np.uint8], last: bool) -> None:
        """Put a part in its place; the file takes its name when it is complete."""
        partial = Path(f"{path}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            part.tofile(file)
        if last:
            os.replace(partial, path)

    def remove(self, path: str) -> None:
        """Delete a file that may be gone."""
        Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder."""
        self._stack.close()


class Nodes:
    """The nodes that the roles of a run were placed on, by Ray's id."""

    def __init__(self, cluster: Cluster, run: str):
        """Start an agent on every node. That of the controller's own node is in this process."""
        self._cluster, self.local = cluster, cluster.local_node
        self._here = NodeAgent(run)
        others = set(cluster.node_of.values()) - {self.local}
        self._agents = {node: cluster.start_agent(NodeAgent, node, run) for node in others}
        self._facts = {node: self.call(node, "facts") for node in others | {self.local}}
        self.scratch: dict[str, Path] = {node: scratch for node, (scratch, _) in self._facts.items()}
        self.model_path = Path()
        """Where all nodes have the policy's model."""

    def call(self, node: str, method: str, *args: Any) -> Any:
        """Call a method of a node's agent, and wait for its result."""
        if node == self.local:
            return getattr(self._here, method)(*args)
        [result] = self._cluster.get([getattr(self._agents[node], method).remote(*args)])
        return result

    def check(self, marker: Path, model: str) -> None:
        """Find the model on every node. Refuse nodes with other software or another model, or without the run's folder.

        marker: a file in the run's folder. Raises RunFailure naming the nodes and what to do.
        """
        problems, (_, ours) = [], self._facts[self.local]
        self.model_path, fingerprints = self._here.model(model)
        for node in self._agents:
            name = self._cluster.node_name(node)
            _, theirs = self._facts[node]
            problems += [
                f"{name} has {package} {theirs.get(package, 'not installed')}, this node {version}; install the same there"
                for package, version in ours.items()
                if theirs.get(package) != version
            ]
            if self.call(node, "read_text", marker) != marker.read_text():
                problems.append(f"{name} does not see {marker.parent}; set run_root to a folder that all nodes share")
            try:
                if self.call(node, "model", model) != (self.model_path, fingerprints):
                    problems.append(f"{name} has another policy.model, or elsewhere; copy {self.model_path} there")
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise RunFailure("not all nodes can take part:\n  " + "\n  ".join(problems))

    def bring(self, path: str, node: str, move: bool = False) -> str:
        """Path of this file on a node, where it is copied to unless it is there. move: remove it where it was.

        Raises RunFailure when a node that it takes is gone.
        """
        source = self._node_of(path)
        if source == node:
            return path
        target = str(self.scratch[node] / f"from-{source[:8]}" / Path(path).relative_to(self.scratch[source]))
        size = self.call(source, "size", path)
        for start in range(0, max(size, 1), PART_BYTES):
            part = self._part(source, node, path, start)
            self.call(node, "write", target, start, part, start + PART_BYTES >= size)
        if move:
            self.call(source, "remove", path)
        return target

    def remove_all(self, paths: Iterable[str]) -> None:
        """Delete files, wherever they are."""
        for path in paths:
            self.call(self._node_of(path), "remove", path)

    def close(self) -> None:
        """Remove the folders of all nodes that are there."""
        for node in self.scratch:
            with suppress(RunFailure):
                self.call(node, "close")

    def _node_of(self, path: str) -> str:
        return next(node for node, folder in self.scratch.items() if Path(path).is_relative_to(folder))

    def _part(self, source: str, target: str, path: str, start: int) -> Any:
        """A part of a file. Between agents it is a reference, so that it does not come through this process."""
        if source == self.local or target == self.local:
            return self.call(source, "read", path, start)
        return self._agents[source].read.remote(path, start)
