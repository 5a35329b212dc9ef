"""The feature tap: hidden states of every verified token, kept as the engine computes them.

Runs inside the vLLM worker; knows nothing of vLLM. Rows are written by absolute position, so a rejected draft token's
row is overwritten by the token that took its place. What was never computed (a prefix-cache hit) or was lost (window)
stays a hole, and `take` masks holes; it never fills them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cotrain.config import FeatureTapConfig

UNWRITTEN = -1
FIRST_ROWS = 128


@dataclass
class _Recording:
    """Rows of one request. Row p % capacity belongs to position p."""

    rows: Tensor  # [C, A*H + H]
    positions: Tensor  # [C] int64, UNWRITTEN where empty
    token_ids: Tensor  # [C] int64
    length: int = 0  # positions seen so far


@dataclass(frozen=True)
class TakenFeatures:
    """Features of one finished rollout of T tokens."""

    aux_hidden: Tensor  # [T, A*H]
    final_hidden: Tensor  # [T, H]
    mask: Tensor  # [T] bool


class FeatureTap:
    """Bounded store of hidden states, by request and absolute position."""

    def __init__(self, config: FeatureTapConfig):
        self.config = config
        self._recordings: dict[str, _Recording] = {}
        self._refused: set[str] = set()
        self._bytes = 0
        self._tokens = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    @property
    def num_refused(self) -> int:
        """Requests not tapped since the last `clear`, because a bound was reached."""
        return len(self._refused)

    def record(self, request_id: str, positions: Tensor, token_ids: Tensor, hidden: Tensor) -> None:
        """Keep rows of one request. positions, token_ids [n]; hidden [n, A*H + H]; positions ascend."""
        if request_id in self._refused:
            return
        if self.config.window is not None:  # rows of one call must not fall on each other in the ring
            latest = slice(-self.config.window, None)
            positions, token_ids, hidden = positions[latest], token_ids[latest], hidden[latest]
        length = int(positions[-1]) + 1
        recording = self._room_for(request_id, length, hidden)
        if recording is None:
            return
        self._tokens += max(0, length - recording.length)
        recording.length = max(length, recording.length)
        rows = positions % recording.positions.shape[0]
        recording.rows[rows] = hidden
        recording.positions[rows] = positions
        recording.token_ids[rows] = token_ids

    def _room_for(self, request_id: str, length: int, hidden: Tensor) -> _Recording | None:
        recording = self._recordings.get(request_id)
        capacity, seen = (0, 0) if recording is None else (recording.positions.shape[0], recording.length)
        needed = allocated_rows(length, self.config.window, capacity)
        grown = max(0, needed - capacity) * row_bytes(hidden.shape[1], hidden.element_size())
        tokens = self._tokens + max(0, length - seen)
        if self._bytes + grown > self.config.max_bytes or tokens > self.config.max_tokens_per_step:
            self._refuse(request_id)
            return None
        if needed > capacity:
            self._bytes += grown
            self._recordings[request_id] = _resized(recording, needed, hidden)
        return self._recordings[request_id]

    def _refuse(self, request_id: str) -> None:
        """Stop tapping a request; the room it took goes to the others."""
        if request_id in self._recordings:
            self._tokens -= self._recordings[request_id].length
        self._drop(request_id)
        self._refused.add(request_id)

    def _drop(self, request_id: str) -> None:
        recording = self._recordings.pop(request_id, None)
        if recording is not None:
            self._bytes -= recording.rows.nbytes + recording.positions.nbytes + recording.token_ids.nbytes

    def take(self, request_id: str, token_ids: list[int], final_size: int) -> TakenFeatures | None:
        """Hand over one finished request and forget it; None when it was not tapped.

        token_ids is the whole rollout, prompt and response; a row recorded for another token is a hole.
        """
        recording = self._recordings.get(request_id)
        if recording is None:
            return None
        length = len(token_ids)
        positions = torch.arange(length)
        rows = positions % recording.positions.shape[0]
        mask = (recording.positions[rows] == positions) & (
            recording.token_ids[rows] == torch.tensor(token_ids, dtype=torch.int64)
        )
        mask[-1] = False  # the last token was sampled but never fed back: it has no hidden state
        hidden = torch.where(mask[:, None], recording.rows[rows], 0)
        self._drop(request_id)
        return TakenFeatures(hidden[:, :-final_size], hidden[:, -final_size:], mask)

    def clear(self) -> None:
        """Forget everything and start a new step."""
        self._recordings.clear()
        self._refused.clear()
        self._bytes = self._tokens = 0


def allocated_rows(length: int, window: int | None, capacity: int = 0) -> int:
    """Rows that hold `length` positions: powers of two of the first allocation, or the window at most."""
    if window is not None and length > min(FIRST_ROWS, window):
        return window
    needed = capacity or min(FIRST_ROWS, window or FIRST_ROWS)
    while needed < length:
        needed *= 2
    return needed


def row_bytes(width: int, bytes_per_value: int) -> int:
    """Bytes of one row: hidden states, position and token id."""
    return width * bytes_per_value + 16


def within_bounds(
    sequences: Sequence[tuple[list[int], int]], bounds: FeatureTapConfig, bytes_per_row: int
) -> Iterator[list[tuple[list[int], int]]]:
    """Sequences, (tokens, prompt length) each, in groups that a tap holds whole. Raises ValueError where one is more."""
    group: list[tuple[list[int], int]] = []
    tokens = num_bytes = 0
    for sequence in sequences:
        length = len(sequence[0])
        size = allocated_rows(length, bounds.window) * bytes_per_row
        if length > bounds.max_tokens_per_step or size > bounds.max_bytes:
            raise ValueError(
                f"rollout.features: a sequence of {length} tokens takes {size} bytes of the tap; raise max_bytes "
                f"({bounds.max_bytes}) or max_tokens_per_step ({bounds.max_tokens_per_step})"
            )
        if group and (tokens + length > bounds.max_tokens_per_step or num_bytes + size > bounds.max_bytes):
            yield group
            group, tokens, num_bytes = [], 0, 0
        group.append(sequence)
        tokens, num_bytes = tokens + length, num_bytes + size
    if group:
        yield group


def _resized(recording: _Recording | None, capacity: int, hidden: Tensor) -> _Recording:
    new = _Recording(
        torch.empty(capacity, hidden.shape[1], dtype=hidden.dtype),
        torch.full((capacity,), UNWRITTEN, dtype=torch.int64),
        torch.full((capacity,), UNWRITTEN, dtype=torch.int64),
    )
    if recording is not None:
        filled = len(recording.positions)  # what can still grow has not wrapped: position p is in row p
        new.rows[:filled] = recording.rows
        new.positions[:filled] = recording.positions
        new.token_ids[:filled] = recording.token_ids
        new.length = recording.length
    return new
