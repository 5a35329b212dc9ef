"""Drafting from history inside vLLM's model runner V1: alone, or in turns with a drafter, whichever is faster in a step."""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cotrain.engine.interface import attach, attached
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import Choice, ServedAcceptance
from cotrain.engine.speculation.step_costs import ratio_at
from drafters.suffix.frequencies import spread
from drafters.suffix.index import Drafts, SuffixIndex
from drafters.suffix.requests import RequestTexts, key_of

MATCHES = (2, 4, 8, 16)
"""Bounds of the match lengths whose acceptance is counted separately: up to 1 token, 2 or 3, and so on."""

NOTHING = Choice(0, 1.0)


class Proposal(NamedTuple):
    """What history proposed for one request, until it is known how much of it was accepted."""

    match: int
    """Class of the match that the draft follows."""
    num_tokens: int
    """Draft tokens that were wanted. The index may have had fewer, which counts as if the others had been rejected."""
    num_drafted: int


class Step(NamedTuple):
    """The requests of a step with the texts that they have at its end."""

    requests: list[str]
    rows: NDArray[np.int64]
    """Their rows in RequestTexts [R]."""
    num_new: NDArray[np.int64]
    """Number of tokens that the step has emitted [R]; 0 while a prompt is computed."""


class HistoryDrafting:
    """Replaces the runner's propose_draft_token_ids.

    In each step all drafts come from history, or all from the drafter, or there are none. That is decided by the lengths of the
    requests' matches and by acceptance so far. Both are known before any token of a draft is drawn, so the emitted tokens keep
    their distribution.
    """

    def __init__(self, model_runner: Any, index: SuffixIndex, draws: bool, drafter: Callable[..., Any] | None = None):
        """draws: see SuffixIndex.draft; may change. drafter: takes the arguments of propose_draft_token_ids, and returns drafts of
        the scheduler output's length. Without one, vLLM takes this object for its look-up of n-grams."""
        self._index, self.draws = index, draws
        self._pool, self._piece = ThreadPoolExecutor(1, "history"), Future[bool]()
        self._piece.set_result(False)
        self._runner, self._drafter = model_runner, drafter
        self._take, self._proposer = model_runner.take_draft_token_ids, ""
        self._of_match = [ServedAcceptance(model_runner.num_spec_tokens) for _ in (*MATCHES, None)]
        self._proposals: dict[str, Proposal] = {}
        self._texts: RequestTexts | None = None
        self._probabilities = Probabilities(model_runner)
        self._counts: Counter[str] = Counter()
        model_runner.propose_draft_token_ids = self.propose
        model_runner.take_draft_token_ids = self.take_draft_token_ids

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

    def take_report(self) -> dict[str, dict[str, float]]:
        """Return counts (drafts, draft tokens, accepted ones by proposer since the last call) and state (size)."""
        counts, self._counts = self._counts, Counter()
        state: dict[str, float] = {"history/tokens": self.index.num_tokens, "history/bytes": self.index.num_bytes}
        return {"counts": dict(counts), "state": state}

    def take_draft_token_ids(self) -> Any:
        """Stand in for the runner's take_draft_token_ids: the drafts carry the name of their proposer to the scheduler."""
        drafts = self._take()
        if drafts is not None:
            attach(drafts, self._proposer)
        return drafts

    def propose(self, scheduler_output: Any, sampled: Any, sampling_metadata: Any, *rest: Any) -> Any:
        """Stand in for the runner's propose_draft_token_ids. Returns a list of draft tokens for each request, or the drafter's."""
        runner, plan, k = self._runner, attached(scheduler_output), scheduler_output.num_spec_tokens_to_schedule
        step = self._follow(sampled, k)
        self._learn(scheduler_output.scheduled_spec_decode_tokens, step)
        draws = self.draws and not sampling_metadata.all_greedy
        greedy = np.full(len(step.requests), not draws)
        if draws and not sampling_metadata.all_random:
            greedy = (sampling_metadata.temperature < 1e-5).cpu().numpy()
        drafts = self._drafts(plan, step, greedy, k)
        self._go_on_learning()
        self._proposer = "" if drafts is None else "history"
        if self._drafter is not None:
            own = copy.copy(scheduler_output)
            own.num_spec_tokens_to_schedule = plan.drafter_length if drafts is None else 0
            of_drafter = self._drafter(own, sampled, sampling_metadata, *rest)
            if drafts is None:
                self._proposer = "drafter" if plan.drafter_length else ""
                return of_drafter
        if sampling_metadata.all_greedy or drafts is None or not drafts.nums.any():
            runner._draft_probs = runner._draft_prob_req_ids = None
        else:
            runner._draft_probs, runner._draft_prob_req_ids = self._probabilities.of(drafts, greedy), step.requests
        return [[] for _ in step.requests] if drafts is None else drafts.lists()

    def _drafts(self, plan: Plan, step: Step, greedy: NDArray[np.bool_], k: int) -> Drafts | None:
        """Return the requests' drafts from history, or None where this step has none from history."""
        assert self._texts is not None
        probes, other = plan.probes == "history", self._drafter is not None and plan.probes == "drafter"
        by_match = [acceptance.best(plan.ratios, k) for acceptance in self._of_match]
        if other or not (probes or any(choice.length for choice in by_match)):  # a look-up takes time too
            return None
        drafts = self.index.draft(self._texts, np.where(step.num_new > 0, step.rows, -1), k, ~greedy)
        nums, classes = drafts.nums.tolist(), match_classes(drafts.matches).tolist()
        choices = [by_match[of_match] if num else NOTHING for of_match, num in zip(classes, nums, strict=True)]
        rival = 1.0 if self._drafter is None else max(1.0, plan.drafter_speed)
        if not probes and speed_of(choices, plan.ratios) <= rival:
            return None
        lengths = [min(choice.length + probes, k) for choice in choices]
        for request, of_match, length, num in zip(step.requests, classes, lengths, nums, strict=True):
            if length and num:
                self._proposals[request] = Proposal(of_match, length, min(length, num))
        return drafts.first(np.array(lengths))

    def _follow(self, sampled: Any, k: int) -> Step:
        """Bring the texts up to what this step has emitted.

        vLLM calls a drafter before it adds the new tokens to its batch, with a tensor [R, 1 or more] that is -1 where there is
        no token. It calls the n-gram look-up afterwards, with lists.
        """
        batch, requests = self._runner.input_batch, list(self._runner.input_batch.req_ids)
        discarded = np.asarray(self._runner.discard_request_mask.np[: len(requests)])
        if torch.is_tensor(sampled):
            new = np.where(discarded[:, None], -1, sampled.cpu().numpy()[: len(requests)]).astype(np.int32)
            num_new = (new >= 0).sum(1)
        else:
            new = np.empty((len(requests), 0), np.int32)
            num_new = np.where(discarded, 0, [len(tokens) for tokens in sampled[: len(requests)]])
        if self._texts is None:
            num_requests, length = batch.token_ids_cpu.shape
            self._texts = RequestTexts(num_requests, length + 2 * (self._runner.num_spec_tokens + 1))
        lengths, prompt_lengths = batch.num_tokens_no_spec, batch.num_prompt_tokens
        rows = self._texts.follow(requests, batch.token_ids_cpu, lengths, prompt_lengths, new)
        return Step(requests, rows, num_new)

    def _learn(self, verified: dict[str, list[int]], step: Step) -> None:
        """Count how many draft tokens of the step before were accepted. verified: draft tokens by request."""
        seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for request, num_new in zip(step.requests, step.num_new.tolist(), strict=True):
            proposal, drafted = self._proposals.pop(request, None), len(verified.get(request, ()))
            if not (drafted and num_new):
                continue  # vLLM drops drafts of requests that it computes again
            accepted = min(num_new - 1, drafted)
            if proposal is not None:
                was_cut = drafted < proposal.num_drafted
                seen[proposal.match].append((drafted if was_cut else proposal.num_tokens, accepted))
            name = "drafter" if proposal is None else "history"
            self._counts[f"{name}/drafts"] += 1
            self._counts[f"{name}/drafted_tokens"] += drafted
            self._counts[f"{name}/accepted_tokens"] += accepted
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
