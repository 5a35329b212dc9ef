"""The texts of the requests that run, kept so that a step adds only its new tokens."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.suffix import frequencies

Tokens = NDArray[np.int32]

KEY_BYTES = 16


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
