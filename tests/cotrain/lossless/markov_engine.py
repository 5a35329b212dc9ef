"""The simulated sampler behind the interfaces of a rollout engine and of a Hugging Face model."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cotrain.lossless.emitted import target_log_probs
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, Versions, WeightPayload
from tests.cotrain.lossless.conftest import MODEL
from tests.cotrain.lossless.simulated_sampler import VOCAB, Setting, draw, speculate


class MarkovModel(nn.Module):
    """The target as a causal language model: hidden states are one-hot tokens, the head holds the table of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(VOCAB, VOCAB, bias=False)
        self.head.weight.data = torch.from_numpy(MODEL.target.T).float().contiguous()

    def base_model(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(input_ids, VOCAB).float())

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class MarkovEngine:
    """As far as `cotrain verify` needs a RolloutEngine. Seeds are ignored: every draw is from one generator."""

    def __init__(self, bug: str | None = None, seed: int = 0):
        self.bug, self.rng = bug, np.random.default_rng(seed)
        self.num_speculative_tokens, self.method = 3, "probabilistic"
        self.versions = Versions(0, 0)
        self.received: list[WeightPayload] = []
        self.greedy_differs = False
        self.num_requests = 0

    async def set_num_speculative_tokens(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    async def set_draft_sample_method(self, method: str) -> None:
        self.method = method

    async def reset_prefix_cache(self) -> None: ...

    async def update_drafter(self, payload: WeightPayload, version: int) -> None:
        assert version > self.versions.drafter
        self.versions = Versions(0, version)
        self.received.append(payload)

    async def generate(
        self, requests: list[RolloutRequest], tap: bool, max_tokens: int, temperature: float, top_p: float, top_k: int
    ) -> RolloutBatch:
        drafts = self.method if temperature else "greedy"
        setting = Setting(temperature, top_p, max(top_k, 0), drafts, self.num_speculative_tokens)
        prompts = np.array([request.prompt_token_ids[-1] for request in requests])
        log_law = target_log_probs(torch.from_numpy(MODEL.target), setting.sampling).numpy()
        first = draw(np.exp(log_law)[prompts], self.rng)
        emitted = speculate(MODEL, setting, len(requests), max_tokens - 1, self.rng, self._bug(temperature), first)
        self.num_requests += len(requests)
        behaviour = log_law if temperature else torch.from_numpy(MODEL.target).log_softmax(1).numpy()
        rollouts = []
        for i, request in enumerate(requests):
            own = emitted.select(emitted.chain == i)
            tokens = [int(first[i]), *own.token.tolist()]
            before = [int(prompts[i]), *tokens[:-1]]
            starts = [*np.flatnonzero(own.offset == 0), len(own.token)]
            steps = [(self.num_speculative_tokens, int(own.accepted[a:b].sum())) for a, b in pairwise(starts)]
            rollouts.append(self._rollout(request, tokens, behaviour[before, tokens].tolist(), steps))
        return RolloutBatch(rollouts, [], 1.0, len(requests) * max_tokens)

    def _bug(self, temperature: float) -> str | None:
        return self.bug if temperature or self.greedy_differs else None

    def _rollout(
        self, request: RolloutRequest, tokens: list[int], log_probs: list[float], steps: list[tuple[int, int]]
    ) -> Rollout:
        return Rollout(
            request.prompt_id, request.sample_index, request.prompt_token_ids, tokens, log_probs, "", "length",
            self.versions, tuple(steps) if self.num_speculative_tokens else (),
        )  # fmt: skip
