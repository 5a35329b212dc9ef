"""The feature tap: hidden states of every verified token, kept as the engine computes them.

Runs inside the vLLM worker; knows nothing of vLLM. Rows are written by absolute position, so a rejected draft token's
row is overwritten by the token that took its place.

A prompt's rows are kept once for all requests with these tokens: they depend on nothing else but the policy. So the rows
that a request did not compute, because its prompt was in the prefix cache, are those that another one computed. What no
tapped request computed stays a hole, and `take` masks holes; the engine has one request of each prompt compute it whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cotrain.rollout.tap_admission import TapRequest

UNWRITTEN = -1
FIRST_ROWS = 128


class _Recording:
    """Rows of one prompt or of one response. Row p belongs to its position p, counted from its own start."""

    def __init__(self, length: int, width: int, dtype: torch.dtype):
        """length: of the prompt, or the greatest of the response. width: A*H + H."""
        self._length = length
        self._rows = torch.empty((0, width), dtype=dtype)
        self._token_ids = torch.empty(0, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes + self._token_ids.nbytes

    def write(self, first: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Keep rows from position `first` on."""
        end = min(first + len(token_ids), self._length)  # drafts beyond the end of a response are verified too
        if first < end:
            self._make_room(end)
            self._rows[first:end] = hidden[: end - first]
            self._token_ids[first:end] = token_ids[: end - first]

    def read(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden [T, A*H + H], mask [T]) of the first T positions; a row recorded for another token is masked."""
        self._make_room(len(token_ids))
        return self._rows[: len(token_ids)], self._token_ids[: len(token_ids)] == token_ids

    def _make_room(self, length: int) -> None:
        """Double the rows until they hold `length` positions; there are never more than the whole length."""
        filled = len(self._token_ids)
        if filled < length:
            capacity = max(filled, FIRST_ROWS)
            while capacity < length:
                capacity *= 2
            added = min(capacity, self._length) - filled
            self._rows = torch.cat([self._rows, self._rows.new_empty((added, self._rows.shape[1]))])
            self._token_ids = torch.cat([self._token_ids, self._token_ids.new_full((added,), UNWRITTEN)])


class FeatureTap:
    """Hidden states of the requests that were chosen for one step, by request and absolute position."""

    def __init__(self) -> None:
        self._requests: dict[str, TapRequest] = {}
        self._prompts: dict[int, _Recording] = {}
        self._responses: dict[str, _Recording] = {}

    @property
    def is_recording(self) -> bool:
        """Is there a request to tap?"""
        return bool(self._requests)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(recording.num_bytes for recording in (*self._prompts.values(), *self._responses.values()))

    def start(self, requests: Mapping[str, TapRequest]) -> None:
        """Forget everything and start a new step, of these requests by name; all others are ignored."""
        self._requests = dict(requests)
        self._prompts.clear()
        self._responses.clear()

    def record(self, name: str, first: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Keep rows of one request from position `first` on. token_ids [n], hidden [n, A*H + H]."""
        request = self._requests.get(name)
        if request is None:
            return
        like, length = (hidden.shape[1], hidden.dtype), request.prompt_length
        of_prompt = max(0, length - first)
        if of_prompt:
            prompt = self._prompts.setdefault(request.prompt, _Recording(length, *like))
            prompt.write(first, token_ids[:of_prompt], hidden[:of_prompt])
        if of_prompt < len(token_ids):
            response = self._responses.setdefault(name, _Recording(request.max_new_tokens, *like))
            response.write(max(0, first - length), token_ids[of_prompt:], hidden[of_prompt:])

    def take(self, name: str, token_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """(hidden [T, A*H + H], mask [T]) of one finished request, whose response is forgotten; None if not tapped.

        token_ids [T]: the whole rollout, prompt and response. A row recorded for another token is a hole.
        """
        request = self._requests.pop(name, None)
        if request is None or request.prompt not in self._prompts:
            return None
        length = request.prompt_length
        hidden, mask = self._prompts[request.prompt].read(token_ids[:length])
        if name in self._responses:
            parts = zip((hidden, mask), self._responses.pop(name).read(token_ids[length:]), strict=True)
            hidden, mask = (torch.cat(part) for part in parts)
        num_missing = len(token_ids) - len(mask)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, num_missing))
        mask = torch.nn.functional.pad(mask, (0, num_missing))
        mask[-1] = False  # the last token was sampled but never fed back: it has no hidden state
        return hidden.masked_fill(~mask[:, None], 0), mask
