"""The index of finished rollouts that drafts are proposed from, and the texts of the requests that run."""

import hashlib
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drafters.suffix import frequencies

T = TypeVar("T")
Tokens = NDArray[np.int32]

KEY_BYTES = 16

EVERY_PROMPT = bytes(KEY_BYTES)  # key of the segments that hold the texts of all prompts

LEARNT_BYTES_PER_TOKEN = 3 * 4
"""An int32 for the token, one in the segments of its prompt and one in those of all prompts."""

BYTES_PER_TOKEN = LEARNT_BYTES_PER_TOKEN + 4  # and one in a merge

PIECE = 2**14
"""Positions that `advance` sorts or merges, which takes about 1 ms; it may handle nearly three times as many."""

BLOCK = 2**11  # positions of a text that are sorted at once; longer texts are merged from such blocks


NO_ROWS = np.zeros((0, 4), np.int64)


class Scope:
    """The segments that hold the texts of one prompt, or those of all, from old to new, and their rows [S, 4] for numba.

    A segment has positions in some texts of a generation, sorted by the context before them.
    """

    def __init__(self, text: Tokens):
        self._text = text
        self._segments: list[Tokens] = []
        self.rows = NO_ROWS  # addresses and sizes of text and segment

    def put(self, segment: Tokens) -> "Pieces[None]":
        """Add a segment, and merge it with the one before it while that is less than twice as long."""
        segments = self._segments
        self._replace(len(segments), segment)
        while len(segments) > 1 and len(segments[-2]) < 2 * len(segments[-1]):
            both = yield from merged(self._text, *segments[-2:])
            self._replace(len(segments) - 2, both)

    def _replace(self, start: int, segment: Tokens) -> None:
        """Let a segment take the place of those from start on."""
        row = np.array([[self._text.ctypes.data, segment.ctypes.data, len(self._text), len(segment)]], np.int64)
        self._segments[start:], self.rows = [segment], np.concatenate([self.rows[:start], row])


class Generation:
    """Texts that came one after the other, and are forgotten together."""

    def __init__(self, room: int):
        """room: most tokens, separators included."""
        self.text = np.empty(room, np.int32)  # each response after a separator
        self.size = 0  # tokens in use
        self.keys: list[bytes] = []  # of the prompt of each response
        self.scopes: dict[bytes, Scope] = {}


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


def key_of(prompt_token_ids: Sequence[int] | Tokens) -> bytes:
    """Return the key of a prompt: requests with the same prompt tokens share a history."""
    return hashlib.blake2b(np.asarray(prompt_token_ids, np.int32).tobytes(), digest_size=KEY_BYTES).digest()


class RequestTexts:
    """Prompt and response of each running request, in a row of its own, with the places that follow the same token linked."""

    def __init__(self, num_requests: int, length: int):
        """num_requests: most at once. length: most tokens of a prompt, its response and a draft."""
        self.texts, self.links = (np.zeros((num_requests, length), np.int32) for _ in range(2))
        self.heads = np.zeros((num_requests, frequencies.BUCKETS), np.int32)
        self.lengths, self.prompt_lengths = (np.zeros(num_requests, np.int64) for _ in range(2))
        self.keys = [b""] * num_requests
        self._rows: dict[str, int] = {}
        self._free = list(range(num_requests))

    def follow(
        self, requests: list[str], texts: Tokens, lengths: NDArray[np.int64], prompt_lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Bring all texts up to the end of a step, and forget those of other requests. Returns the rows of the requests [R].

        texts [R or more, N], lengths, prompt_lengths [R or more]: what vLLM's batch holds. It is read where it is longer than
        what is known.
        """
        for ended in self._rows.keys() - requests:
            self._free.append(self._rows.pop(ended))
        for i, request in enumerate(requests):
            if request not in self._rows:
                self._rows[request] = row = self._free.pop()
                self.heads[row], self.lengths[row], self.prompt_lengths[row] = 0, 0, prompt_lengths[i]
                self.keys[row] = key_of(texts[i, : prompt_lengths[i]])
        rows = np.array([self._rows[request] for request in requests], np.int64)
        frequencies.follow(self.texts, self.links, self.heads, self.lengths, rows, texts, lengths)
        return rows


class SuffixIndex:
    """Counts of what followed each context, in the rollouts of the same prompt and in those of all prompts.

    A new text makes a small segment, which is merged with the one before it while that is less than twice as long. So a
    look-up visits few segments, and a token is merged again only about as often as the index has doubled since it came.
    Texts belong to one of two generations. When the newer one is full, the older one is forgotten.

    Learning is done by `advance`, in pieces that take a few milliseconds however large the index is. The index is the same after
    the same calls: it never depends on time, because all ranks of an engine must propose the same drafts.
    """

    def __init__(self, max_bytes: int, seed: int = 0):
        """max_bytes: room for at least four tokens; the configuration bounds it, because positions have 32 bits."""
        self.max_tokens = max_bytes // BYTES_PER_TOKEN
        self._room, self._rng = self.max_tokens // 2, np.random.default_rng(seed)
        self.forget()

    def forget(self) -> None:
        """Forget every text."""
        self._generations = Generation(self._room), Generation(self._room)  # the older and the newer one
        self._work: deque[Pieces[None]] = deque()  # learns the texts without a segment, one each

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the index, each counted once."""
        return sum(generation.size - len(generation.keys) for generation in self._generations)

    @property
    def num_bytes(self) -> int:
        """Bytes in use when all texts are learnt."""
        return LEARNT_BYTES_PER_TOKEN * sum(generation.size for generation in self._generations)

    @property
    def is_behind(self) -> bool:
        """Whether there is a text that `advance` has not learnt."""
        return bool(self._work)

    # -- learning ----------------------------------------------------------------------------------------------------

    def add(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Let `advance` learn a finished response. If it would fill more than half of the room, only its end is kept."""
        text = np.asarray([frequencies.SEPARATOR, *token_ids[1 - self._room :]], np.int32)
        if len(text) == 1:
            return
        if self._generations[1].size + len(text) > self._room:
            self._generations = self._generations[1], Generation(self._room)
        newer = self._generations[1]
        start, end = newer.size, newer.size + len(text)
        newer.text[start:end] = text
        newer.size = end
        newer.keys.append(key)
        self._work.append(self._learn(newer, key, start, end))

    def advance(self) -> bool:
        """Learn a piece of what is waiting. Returns whether there is more."""
        done = 0
        while self._work and done < PIECE:
            size = next(self._work[0], None)
            if size is None:
                self._work.popleft()
            done += size or 0
        return self.is_behind

    def _learn(self, generation: Generation, key: bytes, start: int, end: int) -> "Pieces[None]":
        """Learn the text from start to end, unless it has been forgotten before."""
        if generation not in self._generations:
            return
        segment = yield from sorted_by_context(generation.text, start + 1, end)
        for name in (key, EVERY_PROMPT):
            yield from generation.scopes.setdefault(name, Scope(generation.text)).put(segment)

    # -- looking up --------------------------------------------------------------------------------------------------

    def draft(self, requests: RequestTexts, rows: NDArray[np.int64], k: int, draws: NDArray[np.bool_]) -> Drafts:
        """Propose at most k tokens after the texts of requests, fewer where nothing is known.

        rows [R]: the requests, -1 where nothing is to be proposed. draws [R]: whether to draw each token from its distribution
        with the index's own generator, or to take the likeliest.
        """
        keys = [requests.keys[row] for row in rows.tolist()]
        own, every = self._rows(keys), np.concatenate(self._rows([EVERY_PROMPT]))
        ends = np.cumsum([len(of_prompt) for of_prompt in own])[1::2]
        state = requests.texts, requests.links, requests.heads, requests.lengths
        starts = requests.prompt_lengths[rows]
        return Drafts(*frequencies.draft(state, rows, starts, np.concatenate(own), ends, every, k, draws, self._rng))

    def _rows(self, keys: list[bytes]) -> list[NDArray[np.int64]]:
        """Return the rows of two scopes for each key, that of the older generation and that of the newer one."""
        scopes = (generation.scopes.get(key) for key in keys for generation in self._generations)
        return [scope.rows if scope is not None else NO_ROWS for scope in scopes]

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all texts as a safetensors file."""
        keys = b"".join(key for generation in self._generations for key in generation.keys)
        saved = {
            "texts": np.concatenate([generation.text[: generation.size] for generation in self._generations]),
            "keys": np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES).copy(),
        }
        save_file(saved, path)

    def load(self, path: str | Path) -> None:
        """Replace the texts by those of a saved index; the random generator goes on as it was.

        Raises ValueError when the saved texts need more room than there is.
        """
        saved = load_file(path)
        if (needed := len(saved["texts"])) > self.max_tokens:
            allowed = f"only {self.max_tokens * BYTES_PER_TOKEN} are allowed; raise max_bytes"
            raise ValueError(f"the index in {path} needs {needed * BYTES_PER_TOKEN} bytes, and {allowed}")
        self.forget()
        texts = np.split(saved["texts"], np.flatnonzero(saved["texts"] == frequencies.SEPARATOR))[1:]
        for key, text in zip(saved["keys"], texts, strict=True):
            self.add(key.tobytes(), text[1:].tolist())
            while self.advance():
                pass


Pieces = Generator[int, None, T]  # work that is done in pieces: yields the number of positions that a piece has handled


def sorted_by_context(text: Tokens, start: int, end: int) -> Pieces[Tokens]:
    """Return a segment of the positions from start to end, excluded."""
    if end - start <= BLOCK:
        segment = np.arange(start, end, dtype=np.int32)
        frequencies.sort(text, segment)
        yield len(segment) * len(segment).bit_length()
        return segment
    middle = (start + end) // 2
    first = yield from sorted_by_context(text, start, middle)
    second = yield from sorted_by_context(text, middle, end)
    return (yield from merged(text, first, second))


def merged(text: Tokens, first: Tokens, second: Tokens) -> Pieces[Tokens]:
    """Return one segment with the positions of two."""
    both, reached = np.empty(len(first) + len(second), np.int32), np.zeros(2, np.int64)
    while (before := int(reached.sum())) < len(both):
        frequencies.merge(text, first, second, both, reached, PIECE)
        yield int(reached.sum()) - before
    return both
