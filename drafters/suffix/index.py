"""The index of finished rollouts that drafts are proposed from."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drafters.suffix import frequencies
from drafters.suffix.requests import KEY_BYTES, RequestTexts, Tokens

EVERY_PROMPT = bytes(KEY_BYTES)
"""Key of the segments that hold the texts of all prompts."""

FULL = 0.5
"""Largest share of the room that texts take after room was made, so that it must be made only seldom."""

BYTES_PER_TOKEN = 2 * 2 * 4 + 4
"""An int32 each for text and order of a token, in the segments of its prompt and in those of all prompts, and one in its text."""


class Segment(NamedTuple):
    """A run of texts, with the positions of their tokens sorted by the context before them."""

    text: Tokens
    """Separators included."""
    order: Tokens
    following: Tokens
    """The token at each of these positions, so that counting what follows a context reads neighbours."""
    row: list[int]
    """Addresses of the three arrays, number of tokens and number of positions; valid as long as the segment is."""

    @classmethod
    def of(cls, text: Tokens, order: Tokens) -> "Segment":
        """Return the segment of these arrays."""
        following = text[order]
        addresses = [array.ctypes.data for array in (text, order, following)]
        return cls(text, order, following, [*addresses, len(text), len(order)])


class Scope:
    """The segments that hold the texts of one prompt, or those of all, from old to new, and their rows [S, 5]."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.rows = np.zeros((0, 5), np.int64)

    def replace(self, start: int, *segments: Segment) -> None:
        """Let these segments take the place of those from `start` on."""
        self.segments[start:] = segments
        self.rows = np.array([segment.row for segment in self.segments], np.int64).reshape(-1, 5)


NO_SCOPE = Scope()


class Drafts(NamedTuple):
    """Tokens proposed for R requests, at most k each, with the distributions that they were drawn from.

    Entries beyond the numbers of tokens and of distributions' tokens are undefined.
    """

    tokens: Tokens  # [R, k]
    supports: Tokens  # [R, k, WIDTH]: tokens of each distribution
    probabilities: NDArray[np.float64]  # [R, k, WIDTH]
    sizes: Tokens  # [R, k]: number of tokens in each distribution
    nums: NDArray[np.int64]  # [R]: number of tokens of each draft
    matches: NDArray[np.int64]  # [R]
    """Lengths of the longest matches before the first tokens, known before anything is drawn."""

    def first(self, nums: NDArray[np.int64]) -> "Drafts":
        """Return the first tokens of each draft, at most as many as given [R]."""
        return self._replace(nums=np.minimum(self.nums, nums))

    def lists(self) -> list[list[int]]:
        """Return the tokens of each draft."""
        return [tokens[:num] for tokens, num in zip(self.tokens.tolist(), self.nums.tolist(), strict=True)]

    def distribution(self, request: int, position: int) -> dict[int, float]:
        """Return the distribution that a token was drawn from: probabilities by token."""
        size = self.sizes[request, position]
        of_token = self.supports[request, position, :size], self.probabilities[request, position, :size]
        return dict(zip(*(values.tolist() for values in of_token), strict=True))


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
        added = Segment.of(text, frequencies.sort_by_context(text))
        for name in (key, EVERY_PROMPT):
            scope = self._scopes.setdefault(name, Scope())
            scope.replace(len(scope.segments), added)
            self._used += len(text)
            while len(scope.segments) > 1 and len(scope.segments[-2].text) < 2 * len(scope.segments[-1].text):
                scope.replace(len(scope.segments) - 2, merged(*scope.segments[-2:]))

    def _newest(self) -> list[tuple[bytes, Tokens]]:
        """Return the newest texts, as many as may stay when room is made."""
        sizes = np.cumsum([2 * len(text) for _, text in reversed(self._rollouts)])
        return self._rollouts[-max(1, int((sizes <= FULL * self.max_tokens).sum())) :]

    def _rebuild(self, rollouts: list[tuple[bytes, Tokens]]) -> None:
        """Index these texts alone, with one segment for each prompt and one for all."""
        self._rollouts, self._used = rollouts, 0
        self._scopes: dict[bytes, Scope] = {EVERY_PROMPT: Scope()}
        texts: dict[bytes, list[Tokens]] = defaultdict(list)
        for key, text in rollouts:
            texts[key].append(text)
            texts[EVERY_PROMPT].append(text)
        for name, parts in texts.items():
            text = np.concatenate(parts)
            self._scopes.setdefault(name, Scope()).replace(0, Segment.of(text, frequencies.sort_by_context(text)))
            self._used += len(text)

    # -- looking up --------------------------------------------------------------------------------------------------

    def draft(self, requests: RequestTexts, rows: NDArray[np.int64], k: int, draws: NDArray[np.bool_]) -> Drafts:
        """Propose at most k tokens after the texts of requests, fewer where nothing is known.

        rows [R]: the requests, -1 where nothing is to be proposed. draws [R]: whether to draw each token from its distribution
        with the index's own generator, or to take the likeliest.
        """
        own = [self._scopes.get(requests.keys[row], NO_SCOPE).rows for row in rows.tolist()]
        ends, every = np.cumsum([len(of_prompt) for of_prompt in own]), self._scopes[EVERY_PROMPT].rows
        state = requests.texts, requests.links, requests.heads, requests.lengths
        starts = requests.prompt_lengths[rows]
        return Drafts(*frequencies.draft(state, rows, starts, np.concatenate(own), ends, every, k, draws, self._rng))

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


def merged(first: Segment, second: Segment) -> Segment:
    """Return one segment with the texts of two."""
    text, order = (np.concatenate([a, b]) for a, b in zip(first[:2], second[:2], strict=True))
    order[len(first.order) :] += len(first.text)
    frequencies.merge(text, order, len(first.order), np.empty_like(order))
    return Segment.of(text, order)
