"""The feature tap: the hidden states of every verified token, kept as the engine computes them.

It runs inside the vLLM worker and knows nothing of vLLM. Rows are written by absolute position, so the row of a rejected draft
token is overwritten by the row of the token that took its place.

The rows of a prompt are kept once for all requests with that prompt, because they depend only on its tokens and on the policy. A
request whose prompt was in the prefix cache computes no rows for it, and uses those that another request computed. Rows that no
tapped request computed stay holes, which `take` masks. To avoid them, the engine has one request of each prompt compute it whole.

Each row is stamped with the policy version that computed it. A rollout has rows of one version; those of others are holes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cotrain.engine.tap_admission import TapRequest

UNWRITTEN = -1


class _Recording:
    """Rows of one prompt or of one response. Row p holds position p, counted from the start of that prompt or response.

    Room for all hidden states is allocated at once; the operating system commits memory only for rows that are written.
    """

    def __init__(self, length: int, like: Tensor):
        self.hidden = like.new_empty((length, like.shape[1]))
        self.token_ids = torch.full((length,), UNWRITTEN)
        self.versions = torch.full((length,), UNWRITTEN)

    def write(self, first: int, token_ids: Tensor, hidden: Tensor, version: int) -> None:
        """Keep rows from position `first` on. Rows of drafts that were verified beyond the end of a response are dropped."""
        num = len(self.token_ids[first : first + len(token_ids)])
        self.token_ids[first : first + num] = token_ids[:num]
        self.hidden[first : first + num] = hidden[:num]
        self.versions[first : first + num] = version


class FeatureTap:
    """Hidden states of the requests that were chosen, by request and absolute position."""

    def __init__(self) -> None:
        self.policy_version = 0
        """Policy version that rows are stamped with. Whoever loads new policy weights sets it."""
        self._requests: dict[str, TapRequest] = {}
        self._prompts: dict[str, _Recording] = {}
        self._responses: dict[str, _Recording] = {}

    @property
    def is_recording(self) -> bool:
        return bool(self._requests)

    def start(self, requests: Mapping[str, TapRequest]) -> None:
        """Also tap these requests, by name, until each is taken. Rows of all other requests are ignored."""
        self._requests |= requests

    def record(self, name: str, first: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Keep rows of one request from position `first` on. token_ids [n], hidden [n, A*H + H]."""
        request = self._requests.get(name)
        if request is None:
            return
        length = request.prompt_length
        num = max(0, length - first)
        if num:
            if request.prompt not in self._prompts:
                self._prompts[request.prompt] = _Recording(length, hidden)
            self._prompts[request.prompt].write(first, token_ids[:num], hidden[:num], self.policy_version)
        if num < len(token_ids):
            if name not in self._responses:
                self._responses[name] = _Recording(request.max_new_tokens, hidden)
            self._responses[name].write(max(0, first - length), token_ids[num:], hidden[num:], self.policy_version)

    def take(self, name: str, token_ids: Tensor, policy_version: int) -> tuple[Tensor, Tensor] | None:
        """Return (hidden [T, A*H + H], mask [T]) of a finished request and forget it, or None if nothing of it was tapped.

        token_ids [T]: the whole rollout, prompt and response. A row that was recorded for another token or computed by another
        policy version is a hole. The rows of a prompt are kept until the last request with it is taken.
        """
        request = self._requests.pop(name, None)
        response = self._responses.pop(name, None)
        if request is None or request.prompt not in self._prompts:
            return None
        prompt = self._prompts[request.prompt]
        if all(other.prompt != request.prompt for other in self._requests.values()):
            del self._prompts[request.prompt]
        hidden = prompt.hidden.new_zeros((len(token_ids), prompt.hidden.shape[1]))
        mask = torch.zeros(len(token_ids), dtype=torch.bool)
        for recording, part in ((prompt, slice(request.prompt_length)), (response, slice(request.prompt_length, None))):
            if recording is not None:
                num = len(token_ids[part])
                hidden[part] = recording.hidden[:num]
                of_version = recording.versions[:num] == policy_version
                mask[part] = (recording.token_ids[:num] == token_ids[part]) & of_version
        mask[-1] = False  # the last token was sampled but never fed back: it has no hidden state
        return hidden.masked_fill(~mask[:, None], 0), mask
