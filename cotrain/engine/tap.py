"""The feature tap: the hidden states of every verified token, kept as the engine computes them.

It runs inside the vLLM worker and knows nothing of vLLM. A thread of `tap_ring.py` gives it the rows of each step. Rows are
written by absolute position, so the row of a rejected draft token is overwritten by the row of the token that took its place.

The rows of a prompt are kept once for all requests with that prompt, because they depend only on its tokens and on the policy. A
request whose prompt was in the prefix cache computes no rows for it, and uses those that another request computed. Rows that no
tapped request computed stay holes, which `take` masks. To avoid them, the engine has one request of each prompt compute it whole,
and `share` copies rows between requests whose turns were the same.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from cotrain.engine.tap_admission import TapRequest

UNWRITTEN = -1


class _Recording:
    """Rows of one prompt or of one response, by position. The recording of a response has room for its prompt.

    Room for all hidden states is allocated at once; the operating system commits memory only for rows that are written.
    """

    def __init__(self, length: int, size: int, dtype: torch.dtype):
        """size: bytes of the hidden states of one position."""
        self._bytes = np.empty((length, size), np.uint8)  # numpy asks for huge pages, which come into being faster
        self.hidden = torch.from_numpy(self._bytes).view(dtype)
        self.token_ids = np.full(length, UNWRITTEN)
        self.versions = np.full(length, UNWRITTEN)
        self.num_bytes = 0  # of the rows that have been written

    def write(self, first: int, token_ids: np.ndarray, hidden: Sequence[np.ndarray], version: int) -> int:
        """Keep rows from position `first` on, but none of drafts beyond the end of a response. Returns how many bytes are new."""
        num, column = len(self.token_ids[first : first + len(token_ids)]), 0
        grown = int((self.versions[first : first + num] == UNWRITTEN).sum()) * self._bytes.shape[1]
        self.num_bytes += grown
        self.token_ids[first : first + num] = token_ids[:num]
        for part in hidden:  # numpy copies in this thread alone and lets the engine's go on meanwhile
            self._bytes[first : first + num, column : column + part.shape[1]] = part[:num]
            column += part.shape[1]
        self.versions[first : first + num] = version
        return grown

    def has(self, token_ids: np.ndarray, version: int, rows: slice) -> np.ndarray:
        """Whether each of these rows [n] is that of the text's token [T], computed by this policy version."""
        return (self.token_ids[rows] == token_ids[rows]) & (self.versions[rows] == version)

    def copy(self, other: "_Recording", rows: slice | np.ndarray) -> None:
        """Copy rows of another recording."""
        self.hidden[rows] = other.hidden[rows]
        self.token_ids[rows], self.versions[rows] = other.token_ids[rows], other.versions[rows]


def as_bytes(hidden: Tensor) -> np.ndarray:
    """Return the memory of hidden states [n, W] as an array of bytes, because numpy has no bfloat16."""
    return hidden.view(torch.uint8).numpy()


class FeatureTap:
    """Hidden states of the requests that were chosen, by request and absolute position."""

    def __init__(self) -> None:
        self.policy_version = 0  # policy version that rows are stamped with. Whoever loads new policy weights sets it.
        self.changes = 0  # grows whenever the tapped requests change
        self.dropped = 0  # number of rollouts that were dropped since the last reading
        self._num_bytes, self._max_bytes = 0, math.inf
        self.requests: dict[str, TapRequest] = {}  # by name; others only read it
        self._prompts: dict[str, _Recording] = {}
        self._responses: dict[str, _Recording] = {}

    def start(self, requests: Mapping[str, TapRequest], max_bytes: float = math.inf) -> None:
        """Also tap these requests, by name, until each is taken. Rows of all other requests are ignored.

        max_bytes: of all hidden states held from now on. When there are more, whole rollouts are dropped, see tap_admission.py.
        """
        self.requests |= requests  # in place, because the thread may drop one meanwhile
        self._max_bytes = max_bytes
        self.changes += 1

    def drop(self, names: Collection[str]) -> None:
        """Forget requests of which rows were lost: a rollout is kept whole or not at all."""
        self.dropped += sum(self._forget(name) is not None for name in names)

    def record(
        self,
        name: str,
        first: int,
        token_ids: np.ndarray,
        hidden: Sequence[np.ndarray],
        dtype: torch.dtype,
        version: int,
    ) -> None:
        """Keep rows of one request from position `first` on.

        token_ids [n]. hidden: the bytes of hidden states of this dtype, [n, ...] each, which side by side are the rows.
        """
        request = self.requests.get(name)
        if request is None:
            return
        length, size = request.prompt_length, sum(part.shape[1] for part in hidden)
        num = max(0, length - first)
        if num:
            if request.prompt not in self._prompts:
                self._prompts[request.prompt] = _Recording(length, size, dtype)
            rows = [h[:num] for h in hidden]
            self._num_bytes += self._prompts[request.prompt].write(first, token_ids[:num], rows, version)
        if num < len(token_ids):
            if name not in self._responses:
                self._responses[name] = _Recording(length + request.max_new_tokens, size, dtype)
            rows = [h[num:] for h in hidden]
            self._num_bytes += self._responses[name].write(max(first, length), token_ids[num:], rows, version)
        while self._num_bytes > self._max_bytes and len(held := dict(self.requests)) > 1:
            self.drop([max(held, key=lambda other: held[other].rank)])

    def _forget(self, name: str) -> tuple[TapRequest, _Recording | None, _Recording | None] | None:
        """Remove a request, and return it with what was recorded of its prompt and of its response. None if it is not tapped."""
        request, response = self.requests.pop(name, None), self._responses.pop(name, None)
        if request is None:
            return None
        self.changes += 1
        prompt = self._prompts.get(request.prompt)
        self._num_bytes -= response.num_bytes if response is not None else 0
        if prompt is not None and all(other.prompt != request.prompt for other in list(self.requests.values())):
            self._num_bytes -= prompt.num_bytes
            del self._prompts[request.prompt]
        return request, prompt, response

    def share(self, texts: Mapping[str, tuple[np.ndarray, int]]) -> None:
        """Copy rows between finished requests with the same prompt, as far as their texts are the same: so are their rows.

        A turn finds in the prefix cache what a request computed that said the same and got the same answer, and has no rows of its own
        there. texts: token ids [T] and policy version of each request.
        """
        known = {name: recording for name in texts if (recording := self._responses.get(name)) is not None}
        for (name, own), (other, source) in permutations(known.items(), 2):
            (text, version), first = texts[name], self.requests[name].prompt_length
            length = min(len(text), len(texts[other][0]))
            differs = np.flatnonzero(text[:length] != texts[other][0][:length])
            common = slice(first, differs[0] if len(differs) else length)
            if self.requests[name].prompt == self.requests[other].prompt:
                holes = ~own.has(text, version, common) & source.has(text, version, common)
                own.copy(source, first + np.flatnonzero(holes))

    def take(self, name: str, token_ids: Tensor, policy_version: int) -> tuple[Tensor, Tensor] | None:
        """Return (hidden [T, A*H + H], mask [T]) of a finished request and forget it, or None if nothing of it was tapped.

        token_ids [T]: the whole rollout, prompt and response. A row that was recorded for another token or computed by another
        policy version is a hole. The rows of a prompt are kept until the last request with it is taken.
        """
        if (forgotten := self._forget(name)) is None or (prompt := forgotten[1]) is None:
            return None
        (request, _, response), num = forgotten, len(token_ids)
        if response is None:
            response = _Recording(num, prompt.hidden.shape[1] * prompt.hidden.itemsize, prompt.hidden.dtype)
        response.copy(prompt, slice(request.prompt_length))  # because other requests may share them
        mask = response.has(token_ids.numpy(), policy_version, slice(num))
        mask[-1] = False  # the last token was sampled but never fed back: it has no hidden state
        hidden = response.hidden[:num]
        hidden[np.flatnonzero(~mask)] = 0
        return hidden, torch.from_numpy(mask)
