"""The index of finished rollouts that drafts are proposed from."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drafters.suffix import frequencies

Tokens = NDArray[np.int32]

KEY_BYTES = 16
EVERY_PROMPT = bytes(KEY_BYTES)
"""Key of the segments that hold the texts of all prompts."""

EVERY_PROMPT_WEIGHT = 0.05
"""Weight of a text among those of all prompts: style repeats across problems, content less so."""

FULL = 0.5
"""Largest share of the room that texts take after room was made, so that it must be made only seldom."""

BYTES_PER_TOKEN = 2 * 2 * 4 + 4
"""An int32 each for text and order of a token, in the segments of its prompt and in those of all prompts, and one in its text."""


class Segment(NamedTuple):
    """A run of texts in the arrays, with the positions of their tokens sorted by the context before them."""

    start: int
    size: int
    """Number of tokens, separators included."""
    num_positions: int
    """Number of tokens, separators excluded."""


class Draft(NamedTuple):
    """Tokens proposed for one request, with the distributions that they were drawn from."""

    tokens: Tokens  # [n]
    supports: Tokens  # [n, WIDTH]: tokens of each distribution
    probabilities: NDArray[np.float64]  # [n, WIDTH]
    sizes: Tokens  # [n]: number of tokens in each distribution; entries behind these are undefined
    match: int
    """Length of the longest match before the first token, known before anything is drawn."""

    def first(self, length: int) -> "Draft":
        """Return the first `length` tokens of the draft."""
        return self._replace(tokens=self.tokens[:length])

    def distribution(self, position: int) -> tuple[Tokens, NDArray[np.float64]]:
        """Return the tokens and the probabilities of the distribution that a token was drawn from."""
        size = self.sizes[position]
        return self.supports[position, :size], self.probabilities[position, :size]


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
        self._texts, self._orders = (np.zeros(self.max_tokens, np.int32) for _ in range(2))
        self._rng = np.random.default_rng(seed)
        self.forget()

    def forget(self) -> None:
        """Forget every text."""
        self._rebuild([])

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the index, each counted once."""
        return sum(len(text) - 1 for _, text in self._rollouts)

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return 4 * (2 * self._used + sum(len(text) for _, text in self._rollouts))

    def add(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Add a finished response. If it would fill more than half of the room, only its end is kept."""
        room = self.max_tokens // 4 - 1
        text = np.asarray([frequencies.SEPARATOR, *token_ids[-room:]], np.int32)
        if len(text) == 1:
            return
        self._rollouts.append((key, text))
        if self._used + 2 * len(text) > self.max_tokens:
            self._rebuild(self._newest())
            return
        order = frequencies.sort_by_context(text)
        for scope in (key, EVERY_PROMPT):
            segments = self._segments.setdefault(scope, [])
            segments.append(self._put(text, order))
            while len(segments) > 1 and segments[-2].size < 2 * segments[-1].size:
                if self._used + segments[-2].size + segments[-1].size > self.max_tokens:
                    break  # no text is forgotten for a merge, which waits until there is room
                self._merge_last(segments)

    def _newest(self) -> list[tuple[bytes, Tokens]]:
        """Return the newest texts, as many as may stay when room is made."""
        sizes = np.cumsum([2 * len(text) for _, text in reversed(self._rollouts)])
        return self._rollouts[-max(1, int((sizes <= FULL * self.max_tokens).sum())) :]

    def _rebuild(self, rollouts: list[tuple[bytes, Tokens]]) -> None:
        """Index these texts alone, with one segment for each prompt and one for all. It closes the gaps that merging has left."""
        self._rollouts, self._used = rollouts, 0
        self._segments: dict[bytes, list[Segment]] = {EVERY_PROMPT: []}
        texts: dict[bytes, list[Tokens]] = defaultdict(list)
        for key, text in rollouts:
            texts[key].append(text)
            texts[EVERY_PROMPT].append(text)
        for scope, parts in texts.items():
            text = np.concatenate(parts)
            self._segments[scope] = [self._put(text, frequencies.sort_by_context(text))]

    def _put(self, text: Tokens, order: Tokens) -> Segment:
        segment = Segment(self._used, len(text), len(order))
        self._texts[self._used : self._used + len(text)] = text
        self._orders[self._used : self._used + len(order)] = order
        self._used += len(text)
        return segment

    def _merge_last(self, segments: list[Segment]) -> None:
        first, second = segments[-2:]
        text = np.concatenate([self._texts[s.start : s.start + s.size] for s in (first, second)])
        order = np.concatenate([self._orders[s.start : s.start + s.num_positions] for s in (first, second)])
        order[first.num_positions :] += first.size
        frequencies.merge(text, order, first.num_positions, np.empty_like(order))
        for segment in (second, first):
            if segment.start + segment.size == self._used:
                self._used = segment.start
        segments[-2:] = [self._put(text, order)]

    # -- looking up --------------------------------------------------------------------------------------------------

    def draft(self, key: bytes, text: Tokens, response_start: int, k: int, draws: bool) -> Draft:
        """Propose at most k tokens after a request's text (prompt and response), fewer where nothing is known.

        draws: whether to draw each token from its distribution with the index's own generator, or to take the likeliest.
        """
        own, every = self._segments.get(key, []), self._segments[EVERY_PROMPT]
        segments = np.array([*own, *every], np.int64).reshape(-1, 3)
        weights = np.array([1.0] * len(own) + [EVERY_PROMPT_WEIGHT] * len(every))
        scope = self._texts, self._orders, segments, weights
        return Draft(*frequencies.draft(*scope, text, response_start, k, draws, self._rng))

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all texts as a safetensors file."""
        texts, keys = [text for _, text in self._rollouts], b"".join(key for key, _ in self._rollouts)
        save_file(
            {
                "texts": np.concatenate([np.zeros(0, np.int32), *texts]),
                "lengths": np.array([len(text) for text in texts], np.int64),
                "keys": np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES).copy(),
            },
            path,
        )

    def load(self, path: str | Path) -> None:
        """Replace the texts by those of a saved index; the random generator goes on as it was.

        Raises ValueError when tensors are missing, or when the saved texts need more room than there is.
        """
        saved = load_file(path)
        if missing := {"texts", "lengths", "keys"} - saved.keys():
            raise ValueError(f"{path} is no index of this version: it lacks {', '.join(sorted(missing))}")
        if (needed := 2 * len(saved["texts"])) > self.max_tokens:
            allowed = f"only {self.max_tokens // 2 * BYTES_PER_TOKEN} are allowed; raise max_bytes"
            raise ValueError(f"the index in {path} needs {needed // 2 * BYTES_PER_TOKEN} bytes, and {allowed}")
        texts = np.split(saved["texts"], np.cumsum(saved["lengths"])[:-1])
        self._rebuild([(key.tobytes(), text) for key, text in zip(saved["keys"], texts, strict=False)])
