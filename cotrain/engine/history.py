"""Drafting from history inside vLLM's model runner V1."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import Choice, ServedAcceptance
from cotrain.engine.speculation.step_costs import ratio_at
from drafters.suffix.frequencies import spread
from drafters.suffix.index import Drafts, RequestTexts, SuffixIndex, key_of

MATCHES = (2, 4, 8, 16)
"""Bounds of the match lengths whose acceptance is counted separately: up to 1 token, 2 or 3, and so on."""


class Proposal(NamedTuple):
    """What history proposed for one request, until it is known how much of it was accepted."""

    match: int  # class of the match that the draft follows
    num_tokens: int
    """Draft tokens that were wanted. The index may have had fewer, which counts as if the others had been rejected."""
    num_drafted: int


class Step(NamedTuple):
    """The requests of a step with the texts that they have at its end."""

    requests: list[str]
    rows: NDArray[np.int64]  # their rows in RequestTexts [R]
    num_new: NDArray[np.int64]  # number of tokens that the step has emitted [R]; 0 while a prompt is computed


class HistoryDrafting:
    """Replaces the runner's propose_draft_token_ids, which vLLM takes for its look-up of n-grams.

    How much each request drafts is decided by the length of its match and by acceptance so far. Both are known before any token
    of a draft is drawn, so the emitted tokens keep their distribution.
    """

    def __init__(self, model_runner: Any, index: SuffixIndex, draws: bool):
        """draws: see SuffixIndex.draft; may change."""
        self._index, self.draws = index, draws
        self._pool, self._piece = ThreadPoolExecutor(1, "history"), Future[bool]()
        self._piece.set_result(False)
        self._runner = model_runner
        self._of_match = [ServedAcceptance(model_runner.num_spec_tokens) for _ in (*MATCHES, None)]
        self._proposals: dict[str, Proposal] = {}
        self._texts: RequestTexts | None = None
        self._probabilities = Probabilities(model_runner)
        model_runner.propose_draft_token_ids = self.propose

    def add(self, rollouts: list[tuple[list[int], list[int]]]) -> None:
        """Add finished rollouts to the index: the token ids of each prompt and of its response, emitted ones only."""
        index = self.index
        for prompt, response in rollouts:
            index.add(key_of(prompt), response)
        self._go_on_learning()

    @property
    def index(self) -> SuffixIndex:
        """The index, after the piece that a thread has begun to learn."""
        self._piece.result()
        return self._index

    def _go_on_learning(self) -> None:
        """Let the thread learn a piece while the engine computes. One piece a call keeps the indexes of all ranks alike."""
        if self.index.is_behind:
            self._piece = self._pool.submit(self._index.advance)

    def propose(
        self, scheduler_output: Any, sampled: list[list[int]], sampling_metadata: Any, *rest: Any
    ) -> list[list[int]]:
        """Stand in for the runner's propose_draft_token_ids. sampled: tokens of each request, which the runner's batch has already.

        Returns the draft tokens of each request.
        """
        runner, plan, k = self._runner, scheduler_output.cotrain, scheduler_output.num_spec_tokens_to_schedule
        step = self._follow(sampled)
        self._learn(scheduler_output.scheduled_spec_decode_tokens, step)
        draws = self.draws and not sampling_metadata.all_greedy
        greedy = np.full(len(step.requests), not draws)
        if draws and not sampling_metadata.all_random:
            greedy = (sampling_metadata.temperature < 1e-5).cpu().numpy()
        drafts = self._drafts(plan, step, greedy, k)
        self._go_on_learning()
        if sampling_metadata.all_greedy or drafts is None or not drafts.nums.any():
            runner._draft_probs = runner._draft_prob_req_ids = None
        else:
            runner._draft_probs, runner._draft_prob_req_ids = self._probabilities.of(drafts, greedy), step.requests
        return [[] for _ in step.requests] if drafts is None else drafts.lists()

    def _drafts(self, plan: Plan, step: Step, greedy: NDArray[np.bool_], k: int) -> Drafts | None:
        """Return the requests' drafts, or None where there are none in this step."""
        assert self._texts is not None
        by_match = [acceptance.best(plan.ratios, k) for acceptance in self._of_match]
        if not (plan.probes or any(choice.length for choice in by_match)):  # a look-up takes time too
            return None
        drafts = self.index.draft(self._texts, np.where(step.num_new > 0, step.rows, -1), k, ~greedy)
        nums, classes = drafts.nums.tolist(), match_classes(drafts.matches).tolist()
        choices = [by_match[of_match] if num else Choice(0, 1.0) for of_match, num in zip(classes, nums, strict=True)]
        if not plan.probes and speed_of(choices, plan.ratios) <= 1:
            return None
        lengths = [min(choice.length + plan.probes, k) for choice in choices]
        for request, of_match, length, num in zip(step.requests, classes, lengths, nums, strict=True):
            if length and num:
                self._proposals[request] = Proposal(of_match, length, min(length, num))
        return drafts.first(np.array(lengths))

    def _follow(self, sampled: list[list[int]]) -> Step:
        """Bring the texts up to what this step has emitted."""
        batch, requests = self._runner.input_batch, list(self._runner.input_batch.req_ids)
        discarded = np.asarray(self._runner.discard_request_mask.np[: len(requests)])
        num_new = np.where(discarded, 0, [len(tokens) for tokens in sampled[: len(requests)]])
        if self._texts is None:
            num_requests, length = batch.token_ids_cpu.shape
            self._texts = RequestTexts(num_requests, length + self._runner.num_spec_tokens)
        lengths, prompt_lengths = batch.num_tokens_no_spec, batch.num_prompt_tokens
        rows = self._texts.follow(requests, batch.token_ids_cpu, lengths, prompt_lengths)
        return Step(requests, rows, num_new)

    def _learn(self, verified: dict[str, list[int]], step: Step) -> None:
        """Count how many draft tokens of the step before were accepted. verified: draft tokens by request."""
        seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for request, num_new in zip(step.requests, step.num_new.tolist(), strict=True):
            proposal, drafted = self._proposals.pop(request, None), len(verified.get(request, ()))
            if proposal is None or not num_new:
                continue
            # vLLM cuts drafts at the end of a response, and drops those of requests that it computes again.
            known = drafted if drafted < proposal.num_drafted else proposal.num_tokens
            seen[proposal.match].append((known, min(num_new - 1, drafted)))
        for of_match, drafts in seen.items():
            self._of_match[of_match].observe(drafts)
        for request in self._proposals.keys() - self._runner.requests.keys():  # they have ended
            del self._proposals[request]


class Probabilities:
    """The distributions that drafts come from, as vLLM's rejection sampler reads them.

    The tensor is kept from step to step, and only its few entries that are not 0 are written, because clearing it takes longer
    than all look-ups: R x k x V values. vLLM reads it once, before the next drafts are proposed.
    """

    def __init__(self, model_runner: Any):
        self._runner = model_runner
        self._values = torch.zeros(0)
        self._written = torch.zeros(0, dtype=torch.long)  # places that are not 0

    def of(self, drafts: Drafts, likeliest: NDArray[np.bool_]) -> torch.Tensor:
        """Return the distributions [R, longest draft, V]. likeliest [R]: were a request's tokens not drawn?"""
        shape = len(drafts.nums), int(drafts.nums.max()), self._runner.input_batch.vocab_size
        if len(self._values) < np.prod(shape):
            self._values = torch.zeros(int(np.prod(shape)), device=self._runner.device)
        else:
            self._values[self._written] = 0.0
        places, values = spread(*drafts[:5], likeliest, *shape[1:])
        self._written = torch.from_numpy(places).to(self._values.device)
        self._values[self._written] = torch.from_numpy(values).to(self._values.device)
        return self._values[: int(np.prod(shape))].view(shape)


def match_classes(matches: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the classes of MATCHES that matches of these lengths belong to."""
    return np.searchsorted(MATCHES, matches, side="right")


def speed_of(choices: Sequence[Choice], ratios: Sequence[float] | None) -> float:
    """Return the expected decoding speed of a step relative to no speculation; without step costs, the expected tokens."""
    length = sum(choice.length for choice in choices) / len(choices)
    tokens = sum(choice.tokens for choice in choices) / len(choices)
    return tokens if ratios is None else tokens / ratio_at(ratios, length)
