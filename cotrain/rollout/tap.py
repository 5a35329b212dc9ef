"""The feature tap: hidden states of every verified token, kept as the engine computes them.

Runs inside the vLLM worker; knows nothing of vLLM. Rows are written by absolute position, so a rejected draft token's
row is overwritten by the token that took its place.

A prompt's rows are kept once for all requests with these tokens: they depend on nothing else but the policy. So the rows
that a request did not compute, because its prompt was in the prefix cache, are those that another one computed. What no
tapped request computed stays a hole, and `take` masks holes; the engine has one request of each prompt compute it whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cotrain.rollout.tap_admission import TapRequest

UNWRITTEN = -1
FIRST_ROWS = 128


class _Recording:
    """Rows of one prompt or of one response. Row p belongs to its position p, counted from its own start."""

    def __init__(self, length: int, like: Tensor):
        """length: of the prompt, or the greatest of the response. like [n, A*H + H]: hidden states to come."""
        self._length = length
        self.rows = like.new_empty((0, like.shape[1]))
        self._token_ids = torch.empty(0, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self._token_ids.nbytes

    def write(self, positions: Tensor, token_ids: Tensor, hidden: Tensor) -> None:
        """positions are consecutive."""
        first = int(positions[0])
        end = min(first + len(positions), self._length)  # drafts beyond the end of a response are verified too
        if first >= end:
            return
        self._make_room(end)
        self.rows[first:end] = hidden[: end - first]
        self._token_ids[first:end] = token_ids[: end - first]

    def read(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden [T, A*H + H], mask [T]) of the first T positions; a row recorded for another token is masked."""
        self._make_room(len(token_ids))
        return self.rows[: len(token_ids)], self._token_ids[: len(token_ids)] == token_ids

    def _make_room(self, length: int) -> None:
        """Rows for `length` positions: powers of two of the first allocation, at most the whole length."""
        filled = len(self._token_ids)
        if filled >= length:
            return
        capacity = max(filled, FIRST_ROWS)
        while capacity < length:
            capacity *= 2
        added = min(capacity, self._length) - filled
        self.rows = torch.cat([self.rows, self.rows.new_empty((added, self.rows.shape[1]))])
        self._token_ids = torch.cat([self._token_ids, self._token_ids.new_full((added,), UNWRITTEN)])


@dataclass(frozen=True)
class TakenFeatures:
    """Features of one finished rollout of T tokens."""

    aux_hidden: Tensor  # [T, A*H]
    final_hidden: Tensor  # [T, H]
    mask: Tensor  # [T] bool


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

    def record(self, request_id: str, positions: Tensor, token_ids: Tensor, hidden: Tensor) -> None:
        """Keep rows of one request. positions (consecutive), token_ids [n]; hidden [n, A*H + H]."""
        request = self._requests.get(request_id)
        if request is None:
            return
        length = request.prompt_length
        of_prompt = max(0, length - int(positions[0]))
        if of_prompt:
            prompt = self._prompts.get(request.prompt)
            if prompt is None:
                prompt = self._prompts[request.prompt] = _Recording(length, hidden)
            prompt.write(positions[:of_prompt], token_ids[:of_prompt], hidden[:of_prompt])
        if of_prompt < len(positions):
            response = self._responses.get(request_id)
            if response is None:
                response = self._responses[request_id] = _Recording(request.max_new_tokens, hidden)
            response.write(positions[of_prompt:] - length, token_ids[of_prompt:], hidden[of_prompt:])

    def take(self, request_id: str, token_ids: list[int], final_size: int) -> TakenFeatures | None:
        """Hand over one finished request and forget its response; None when it was not tapped.

        token_ids is the whole rollout, prompt and response; a row recorded for another token is a hole.
        """
        request = self._requests.pop(request_id, None)
        prompt = self._prompts.get(request.prompt) if request else None
        if request is None or prompt is None:
            return None
        response = self._responses.pop(request_id, None)
        tokens, length = torch.tensor(token_ids, dtype=torch.int64), request.prompt_length
        hidden = prompt.rows.new_empty((len(tokens), prompt.rows.shape[1]))
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        hidden[:length], mask[:length] = prompt.read(tokens[:length])
        if response is not None:
            hidden[length:], mask[length:] = response.read(tokens[length:])
        mask[-1] = False  # the last token was sampled but never fed back: it has no hidden state
        hidden[~mask] = 0
        return TakenFeatures(hidden[:, :-final_size], hidden[:, -final_size:], mask)

    def clear(self) -> None:
        """Forget everything; nothing is recorded until the next `start`."""
        self.start({})
