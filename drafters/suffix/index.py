"""The index of finished rollouts that drafts are proposed from."""

from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drafters.suffix import frequencies
from drafters.suffix.requests import KEY_BYTES, RequestTexts, Tokens

T = TypeVar("T")

EVERY_PROMPT = bytes(KEY_BYTES)  # key of the segments that hold the texts of all prompts

FULL = 0.5  # largest share of the room that texts take after room was made, so that it must be made only seldom

BYTES_PER_TOKEN = 3 * 4 * 3
"""An int32 each for text, order and following token, in the segments of its prompt, in those of all prompts, and in a merge."""

MOST_BYTES = BYTES_PER_TOKEN * (2**31 - 1)  # largest index: positions are int32

PIECE = 2**14
"""Positions that `advance` sorts, merges or leaves out, which takes about 1 ms; it may handle nearly three times as many."""

BLOCK = 2**11  # positions of a text that are sorted at once; longer texts are merged from such blocks


class Segment(NamedTuple):
    """A run of texts, with the positions of their tokens sorted by the context before them."""

    text: Tokens  # separators included
    order: Tokens
    following: Tokens  # the token at each of these positions, so that counting what follows a context reads neighbours
    row: list[int]
    """Addresses of the three arrays, number of tokens and number of positions; valid as long as the segment is."""

    @classmethod
    def of(cls, text: Tokens, order: Tokens, following: Tokens) -> "Segment":
        """Return the segment of these arrays."""
        addresses = [array.ctypes.data for array in (text, order, following)]
        return cls(text, order, following, [*addresses, len(text), len(order)])


class Scope:
    """The segments that hold the texts of one prompt, or those of all, from old to new, and their rows [S, 5]."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.rows = np.zeros((0, 5), np.int64)

    def replace(self, start: int, end: int, *segments: Segment) -> None:
        """Let these segments take the place of those from start to end."""
        self.segments[start:end] = segments
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

    All of this is done by `advance`, in pieces that take a few milliseconds however large the index is. The index is the same after
    the same calls: it never depends on time, because all ranks of an engine must propose the same drafts.
    """

    def __init__(self, max_bytes: int, seed: int = 0):
        """Raises ValueError when max_bytes is too small for any text, or too large for positions of 32 bits."""
        self.max_tokens = max_bytes // BYTES_PER_TOKEN
        if self.max_tokens < 4:
            raise ValueError(f"an index of {max_bytes} bytes holds no text; allow at least {4 * BYTES_PER_TOKEN}")
        if max_bytes > MOST_BYTES:
            raise ValueError(f"an index of {max_bytes} bytes has positions above 2^31; allow at most {MOST_BYTES}")
        self._rng = np.random.default_rng(seed)
        self.forget()

    def forget(self) -> None:
        """Forget every text."""
        self._scopes: dict[bytes, Scope] = {EVERY_PROMPT: Scope()}
        self._texts: deque[tuple[bytes, int]] = deque()  # key and size of each text, from old to new
        self._size = 0  # of all texts, with their separators
        self._waiting: deque[tuple[bytes, Tokens]] = deque()  # the newest texts, which are not in segments yet
        self._dropped: Counter[bytes] = Counter()  # size of the oldest texts of each prompt, which are to be taken out
        self._work, self.is_behind = self._working(), False

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the index, each counted once."""
        return self._size - len(self._texts)

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        sizes = (len(segment.text) for scope in self._scopes.values() for segment in scope.segments)
        return 12 * sum(sizes) + 4 * sum(len(text) for _, text in self._waiting)

    # -- learning ----------------------------------------------------------------------------------------------------

    def add(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Let `advance` learn a finished response. If it would fill more than half of the room, only its end is kept."""
        text = np.asarray([frequencies.SEPARATOR, *token_ids[1 - self.max_tokens // 2 :]], np.int32)
        if len(text) == 1:
            return
        self._texts.append((key, len(text)))
        self._waiting.append((key, text))
        self._size += len(text)
        self.is_behind = True
        if self._size <= self.max_tokens:
            return
        while self._size > FULL * self.max_tokens and len(self._texts) > 1:
            if len(self._texts) == len(self._waiting):
                self._waiting.popleft()
            else:
                self._dropped[self._texts[0][0]] += self._texts[0][1]
            self._size -= self._texts.popleft()[1]

    def advance(self) -> bool:
        """Learn or forget a piece of what is waiting. Returns whether there is more."""
        done = 0
        while self.is_behind and done < PIECE:
            size = next(self._work)
            self.is_behind = size is not None
            done += size or 0
        return self.is_behind

    def _working(self) -> Iterator[int | None]:
        """Do all that is waiting; yields the number of positions handled since the last time, or None if there is nothing to do."""
        while True:
            if self._dropped:
                dropped, self._dropped = self._dropped, Counter()
                for key, size in [*dropped.items(), (EVERY_PROMPT, dropped.total())]:
                    yield from self._drop(key, size)
            elif self._waiting:
                key, text = self._waiting.popleft()
                order = yield from sorted_by_context(text)
                for name in (key, EVERY_PROMPT):
                    yield from self._put(name, Segment.of(text, order, text[order]))
            else:
                yield None

    def _put(self, key: bytes, segment: Segment) -> Iterator[int]:
        scope = self._scopes.setdefault(key, Scope())
        segments = scope.segments
        scope.replace(len(segments), len(segments), segment)
        while len(segments) > 1 and len(segments[-2].text) < 2 * len(segments[-1].text):
            joined = yield from merged(*segments[-2:])
            scope.replace(len(segments) - 2, len(segments), joined)

    def _drop(self, key: bytes, size: int) -> Iterator[int]:
        """Take the oldest texts of a scope out, which have this size together."""
        scope = self._scopes[key]
        while size:
            oldest = scope.segments[0]
            if size < len(oldest.text):
                rest = yield from without(oldest, size)
                scope.replace(0, 1, rest)
                return
            size -= len(oldest.text)
            scope.replace(0, 1)
        if not scope.segments and key != EVERY_PROMPT:
            del self._scopes[key]
        yield 1

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
        while self.advance():
            pass
        save_file(
            {
                "texts": np.concatenate(
                    [np.zeros(0, np.int32), *(s.text for s in self._scopes[EVERY_PROMPT].segments)]
                ),
                "lengths": np.array([size for _, size in self._texts], np.int64),
                "keys": np.frombuffer(b"".join(key for key, _ in self._texts), np.uint8).reshape(-1, KEY_BYTES).copy(),
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
        if (needed := len(saved["texts"])) > self.max_tokens:
            allowed = f"only {self.max_tokens * BYTES_PER_TOKEN} are allowed; raise max_bytes"
            raise ValueError(f"the index in {path} needs {needed * BYTES_PER_TOKEN} bytes, and {allowed}")
        self.forget()
        texts = np.split(saved["texts"], np.cumsum(saved["lengths"])[:-1])
        for key, text in zip(saved["keys"], texts, strict=False):
            self.add(key.tobytes(), text[1:].tolist())
            while self.advance():
                pass


Pieces = Generator[int, None, T]  # work that is done in pieces: yields the number of positions that a piece has handled


def sorted_by_context(text: Tokens) -> Pieces[Tokens]:
    """Return the positions of the tokens of one text, sorted by the context before them."""
    orders = [np.arange(start, min(start + BLOCK, len(text)), dtype=np.int32) for start in range(1, len(text), BLOCK)]
    for order in orders:
        frequencies.sort(text, order)
        yield len(order) * len(order).bit_length()
    while len(orders) > 1:
        joined = []
        for first, second in zip(orders[::2], orders[1::2], strict=False):
            order, _ = yield from merged_orders((text, first, first), (text, second, second), 0)
            joined.append(order)
        orders = joined + orders[2 * len(joined) :]
    return orders[0]


def merged(first: Segment, second: Segment) -> Pieces[Segment]:
    """Return one segment with the texts of two."""
    shift = len(first.text)
    text = np.empty(shift + len(second.text), np.int32)
    yield from copied(first.text, text[:shift])
    yield from copied(second.text, text[shift:])
    order, following = yield from merged_orders(first[:3], second[:3], shift)
    return Segment.of(text, order, following)


Run = tuple[Tokens, Tokens, Tokens]


def merged_orders(first: Run, second: Run, shift: int) -> Pieces[tuple[Tokens, Tokens]]:
    """Return order and following tokens of two runs; see frequencies.merge."""
    order, following = (np.empty(len(first[1]) + len(second[1]), np.int32) for _ in range(2))
    reached = np.zeros(2, np.int64)
    while reached.sum() < len(order):
        before = int(reached.sum())
        frequencies.merge(first, second, shift, (order, following), reached, PIECE)
        yield int(reached.sum()) - before
    return order, following


def without(segment: Segment, cut: int) -> Pieces[Segment]:
    """Return a segment without its oldest texts, which are `cut` tokens long together."""
    text, order, following = (np.empty(len(segment.text) - cut, np.int32) for _ in range(3))
    yield from copied(segment.text[cut:], text)
    reached = np.zeros(2, np.int64)
    while reached[0] < len(segment.order):
        frequencies.leave_out(cut, segment.order, segment.following, (order, following), reached, PIECE)
        yield PIECE
    return Segment.of(text, order[: reached[1]], following[: reached[1]])


def copied(source: Tokens, target: Tokens) -> Pieces[None]:
    """Copy an array; numpy lets other threads go on meanwhile."""
    for start in range(0, len(source), 8 * PIECE):
        target[start : start + 8 * PIECE] = source[start : start + 8 * PIECE]
        yield min(len(source) - start, 8 * PIECE) // 8
