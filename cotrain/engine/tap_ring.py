"""Takes the rows of tapped requests out of an engine step, and hands them to the tap in a thread beside the steps.

A step does no more than copy positions and token ids, and see to it that the hidden states of tapped requests stay as they are. On
a CPU the model makes new hidden states in each step, so the thread holds on to them, and finds and copies the rows later. On a
GPU a CUDA graph overwrites them in the next step, so they are gathered on the device, by the stream that computes, and copied
to pinned memory by a stream of their own. PyTorch keeps pinned memory for reuse, so steps take turns in the same few blocks.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cotrain.engine.tap import FeatureTap, as_bytes

MOST_WAITING_BYTES = 512 * 2**20
"""Most bytes of hidden states that wait for the thread. One step may always wait, however large it is."""


class Step(NamedTuple):
    """What waits for the thread: n rows, among them those of R tapped requests."""

    names: list[str]
    numbers: np.ndarray  # [R] place of each request among those that `starts` is of
    starts: np.ndarray  # [requests + 1] row where each of them begins, and where the last one ends
    positions: Any  # [n] array; on a GPU a pinned tensor, as are the token ids
    token_ids: Any  # [n]
    hidden: list[Tensor]  # [n, ...] each; side by side, their columns are a row
    version: int
    ready: Any  # event after which the tensors can be read, or None


class TapRing:
    """Between the model runner and the tap. All methods but the thread's own are called by the engine's thread."""

    def __init__(self, tap: FeatureTap, name_of: Callable[[str], str]):
        self._tap, self._name_of = tap, name_of
        self._thread = ThreadPoolExecutor(1, "cotrain-tap")
        self._waiting = deque[tuple[Future[None], int]]()
        self._batch: tuple[list[str], int] = ([], -1)  # request ids of the last step, and the tap's changes by then
        self._names, self._numbers = list[str](), np.zeros(0, np.int64)
        self._stream: Any = None

    def add(
        self, ids: list[str], starts: np.ndarray, positions: Tensor, input_ids: Tensor, hidden: list[Tensor]
    ) -> None:
        """Keep the rows of a step for the tap. Its tapped requests are dropped whole when too much waits.

        ids [R] and starts [R + 1]: vLLM's requests and the rows where they begin and end; positions, input_ids and hidden by row.
        """
        self._find(ids)
        if not self._names:
            return
        rows = self._rows(starts) if hidden[0].device.type != "cpu" else None
        size = sum(h.nbytes if rows is None else h[0].nbytes * len(rows) for h in hidden)
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()[0].result()  # raises what the thread has raised
        if self._waiting and sum(waits for _, waits in self._waiting) + size > MOST_WAITING_BYTES:
            self._waiting.append((self._thread.submit(self._tap.drop, self._names), 0))
            return
        if rows is not None:
            step = self._gathered(rows, starts, positions, input_ids, hidden)
        else:
            at, tokens = (of_rows[: starts[-1]].numpy().copy() for of_rows in (positions, input_ids))
            step = Step(self._names, self._numbers, starts.copy(), at, tokens, hidden, self._tap.policy_version, None)
        self._waiting.append((self._thread.submit(self._empty, step), size))

    def beside(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the thread do this once the tap has all rows of earlier steps."""
        return self._thread.submit(work)

    def _find(self, ids: list[str]) -> None:
        """Look up the tapped requests of a batch, if it or the tapped requests have changed."""
        if self._batch == (ids, self._tap.changes):
            return
        self._batch, tapped = (list(ids), self._tap.changes), set(self._tap.requests)
        names = [self._name_of(internal) for internal in ids]
        self._numbers = np.array([i for i, name in enumerate(names) if name in tapped], np.int64)
        self._names = [names[i] for i in self._numbers]

    def _rows(self, starts: np.ndarray) -> np.ndarray:
        """Return the rows of the tapped requests of a step [n], in their order."""
        first = starts[self._numbers].astype(np.int64)
        sizes = starts[self._numbers + 1] - first
        return np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())

    def _gathered(
        self, rows: np.ndarray, starts: np.ndarray, positions: Tensor, input_ids: Tensor, hidden: list[Tensor]
    ) -> Step:
        """Gather rows on a GPU, and let them follow to pinned memory on a stream of their own."""
        self._stream = self._stream or torch.cuda.Stream()
        index = torch.from_numpy(rows).pin_memory().to(hidden[0].device, non_blocking=True)
        states = torch.cat([h.index_select(0, index) for h in hidden], dim=-1)
        gathered = states, positions.index_select(0, index), input_ids.index_select(0, index)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in gathered
            ]
            ready = self._stream.record_event()
        for tensor in gathered:
            tensor.record_stream(self._stream)
        starts = np.append(0, np.cumsum(starts[self._numbers + 1] - starts[self._numbers]))
        places, version = np.arange(len(self._names)), self._tap.policy_version
        return Step(self._names, places, starts, copies[1], copies[2], copies[:1], version, ready)

    def _empty(self, step: Step) -> None:
        """Run in the thread: give the tap each request's rows."""
        if step.ready is not None:
            step.ready.synchronize()
        positions, token_ids = np.asarray(step.positions), np.asarray(step.token_ids)
        states, dtype = [as_bytes(h) for h in step.hidden], step.hidden[0].dtype
        first, end = step.starts[step.numbers].tolist(), step.starts[step.numbers + 1].tolist()
        for name, start, stop in zip(step.names, first, end, strict=True):
            rows = [h[start:stop] for h in states]
            self._tap.record(name, int(positions[start]), token_ids[start:stop], rows, dtype, step.version)
