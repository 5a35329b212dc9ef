"""The index of finished rollouts that drafts are proposed from."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drafters.suffix import law

Tokens = NDArray[np.int32]

KEY_BYTES = 16
EVERY_PROMPT = bytes(KEY_BYTES)
"""Key of the segments that hold the texts of all prompts."""

EVERY_PROMPT_WEIGHT = 0.05
"""Weight of a text among those of all prompts: style repeats across problems, content less so."""

FULL = 0.5
"""Largest share of the room that texts take after room was made, so that it must be made only seldom."""

BYTES_PER_TOKEN = 3 * 4 * 2
"""An int32 each for text, order and owner of a token, once in the segments of its prompt and once in those of all prompts."""


class Segment(NamedTuple):
    """A run of texts in the arrays, with the positions of their tokens sorted by the context before them."""

    start: int
    size: int
    """Number of tokens, separators included."""
    num_positions: int
    """Number of tokens, separators excluded."""


class Draft(NamedTuple):
    """Tokens proposed for one request, with the distributions (laws) that they were drawn from."""

    tokens: Tokens  # [n]
    supports: Tokens  # [n, WIDTH]: tokens of each law
    laws: NDArray[np.float64]  # [n, WIDTH]: their probabilities
    sizes: Tokens  # [n]: number of tokens in each law; entries behind these are undefined
    match: int
    """Length of the longest match before the first token, known before anything is drawn."""


def key_of(prompt_token_ids: Sequence[int] | Tokens) -> bytes:
    """Return the key of a prompt: requests with the same prompt tokens share a history."""
    return hashlib.blake2b(np.asarray(prompt_token_ids, np.int32).tobytes(), digest_size=KEY_BYTES).digest()


class SuffixIndex:
    """Counts of what followed each context, in the rollouts of the same prompt and in those of all prompts.

    A new text makes a small segment, which is merged with the one before it while that is less than twice as long. So a
    look-up visits few segments, and a token is merged again only about as often as the index has doubled since it came.
    """

    def __init__(self, max_bytes: int, seed: int = 0):
        """Raises ValueError when max_bytes is too small for any text."""
        self.max_tokens = max_bytes // BYTES_PER_TOKEN * 2
        if self.max_tokens < 8:
            raise ValueError(f"an index of {max_bytes} bytes holds no text; allow at least {4 * BYTES_PER_TOKEN}")
        self._texts, self._orders, self._owners = (np.zeros(self.max_tokens, np.int32) for _ in range(3))
        self.forget()
        self._rng = np.random.default_rng(seed)

    def forget(self) -> None:
        """Forget every text."""
        self._used = self._num_texts = 0
        self._segments: dict[bytes, list[Segment]] = {EVERY_PROMPT: []}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the index, each counted once."""
        return sum(segment.num_positions for segment in self._segments[EVERY_PROMPT])

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return 3 * 4 * self._used

    def add(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Add a finished response. If it would fill more than half of the room, only its end is kept."""
        room = self.max_tokens // 4 - 1
        text = np.asarray([law.SEPARATOR, *token_ids[-room:]], np.int32)
        if len(text) == 1:
            return
        self._num_texts += 1
        order = law.sort_by_context(text)
        for scope in (key, EVERY_PROMPT):
            self._append(scope, text, order)

    def _append(self, scope: bytes, text: Tokens, order: Tokens) -> None:
        if self._used + len(text) > self.max_tokens:
            self._make_room()
        owner = np.int32(self._num_texts - 1)
        segments = self._segments.setdefault(scope, [])
        segments.append(self._put(text, order, np.full(len(text), owner)))
        while len(segments) > 1 and segments[-2].size < 2 * segments[-1].size:
            if self._used + segments[-2].size + segments[-1].size > self.max_tokens:
                break  # no text is forgotten for a merge, which waits until there is room
            self._merge_last(segments)

    def _put(self, text: Tokens, order: Tokens, owners: Tokens) -> Segment:
        start, size = self._used, len(text)
        self._texts[start : start + size], self._owners[start : start + size] = text, owners
        self._orders[start : start + len(order)] = order
        self._used += size
        return Segment(start, size, len(order))

    def _views(self, segment: Segment) -> tuple[Tokens, Tokens, Tokens]:
        start, size, count = segment
        whole = slice(start, start + size)
        return self._texts[whole], self._orders[start : start + count], self._owners[whole]

    def _merge_last(self, segments: list[Segment]) -> None:
        (text_a, order_a, owners_a), (text_b, order_b, owners_b) = (self._views(s) for s in segments[-2:])
        text, owners = np.concatenate([text_a, text_b]), np.concatenate([owners_a, owners_b])
        order = np.concatenate([order_a, order_b + len(text_a)], dtype=np.int32)
        law.merge(text, order, len(order_a), np.empty_like(order))
        for segment in reversed(segments[-2:]):
            if segment.start + segment.size == self._used:
                self._used = segment.start
        segments[-2:] = [self._put(text, order, owners)]

    def _make_room(self) -> None:
        """Forget the oldest texts, down to FULL, and close the gaps that merging has left."""
        places = sorted((segment.start, scope) for scope, segments in self._segments.items() for segment in segments)
        segment_at = {segment.start: segment for segments in self._segments.values() for segment in segments}
        owners = [self._views(segment)[2] for segment in segment_at.values()]
        sizes = np.bincount(np.concatenate(owners), minlength=self._num_texts)
        kept = np.cumsum(sizes[::-1])[::-1] <= FULL * self.max_tokens
        kept[-1] = True  # it is being added
        self._used, self._segments = 0, {EVERY_PROMPT: []}
        for start, scope in places:
            moved = self._move(segment_at[start], kept)
            if moved.num_positions:
                self._segments.setdefault(scope, []).append(moved)
        for segments in self._segments.values():
            segments.sort(key=lambda segment: -segment.size)
        self._num_texts = int(kept.sum())

    def _move(self, segment: Segment, kept: NDArray[np.bool_]) -> Segment:
        """Append the kept texts of a segment, under their new numbers, to the segments that were moved before it."""
        text, order, owners = self._views(segment)
        stays = kept[owners]
        position, number = np.cumsum(stays, dtype=np.int32) - 1, np.cumsum(kept, dtype=np.int32) - 1
        return self._put(text[stays], position[order[stays[order]]], number[owners[stays]])

    # -- looking up --------------------------------------------------------------------------------------------------

    def draft(self, key: bytes, text: Tokens, response_start: int, k: int, draws: bool) -> Draft:
        """Propose at most k tokens after a request's text (prompt and response), fewer where nothing is known.

        draws: whether to draw each token from its distribution with the index's own generator, or to take the likeliest.
        """
        return Draft(*law.draft(*self._scope(key), text, response_start, k, draws, self._rng))

    def _scope(self, key: bytes) -> tuple[NDArray[np.generic], ...]:
        own, every = self._segments.get(key, []), self._segments[EVERY_PROMPT]
        segments = np.array([*own, *every], np.int64).reshape(-1, 3)
        weights = np.array([1.0] * len(own) + [EVERY_PROMPT_WEIGHT] * len(every))
        return self._texts, self._orders, segments, weights

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the whole index as a safetensors file."""
        rows = [(i, *segment) for i, segments in enumerate(self._segments.values()) for segment in segments]
        used = slice(0, self._used)
        save_file(
            {
                "texts": self._texts[used],
                "orders": self._orders[used],
                "owners": self._owners[used],
                "keys": np.frombuffer(b"".join(self._segments), np.uint8).reshape(-1, KEY_BYTES).copy(),
                "segments": np.array(rows, np.int64).reshape(-1, 4),
            },
            path,
        )

    def load(self, path: str | Path) -> None:
        """Replace the texts by those of a saved index; the random generator goes on as it was.

        Raises ValueError when tensors are missing, or when the saved index needs more bytes than this one has.
        """
        saved = load_file(path)
        needed = {"texts", "orders", "owners", "keys", "segments"}
        if missing := needed - saved.keys():
            raise ValueError(f"{path} is no index of this version: it lacks {', '.join(sorted(missing))}")
        if (used := len(saved["texts"])) > self.max_tokens:
            allowed = f"only {12 * self.max_tokens} are allowed; raise max_bytes"
            raise ValueError(f"the index in {path} has {12 * used} bytes, and {allowed}")
        self._used = used
        for name in ("texts", "orders", "owners"):
            getattr(self, f"_{name}")[: self._used] = saved[name]
        keys = [key.tobytes() for key in saved["keys"]]
        self._segments = {key: [] for key in keys}
        for number, *segment in saved["segments"].tolist():
            self._segments[keys[number]].append(Segment(*segment))
        self._num_texts = int(saved["owners"].max(initial=-1)) + 1
