"""Drafting from history inside vLLM's model runner V1: alone, or in turns with a drafter, whichever is faster in a step."""

import copy
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cotrain.engine.interface import attach, attached
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import Choice, ServedAcceptance
from cotrain.engine.speculation.step_costs import ratio_at
from drafters.suffix.index import Draft, SuffixIndex, key_of

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


class Text(NamedTuple):
    """Text of a request at the end of a step."""

    tokens: NDArray[np.int32]
    """Prompt and response [n]."""
    prompt_length: int
    num_new: int
    """Number of tokens that the step has emitted; 0 while the prompt is computed."""


class HistoryDrafting:
    """Replaces the runner's propose_draft_token_ids.

    In each step all drafts come from history, or all from the drafter, or there are none. That is decided by the lengths of the
    requests' matches and by acceptance so far. Both are known before any token of a draft is drawn, so the emitted tokens keep
    their distribution.
    """

    def __init__(self, model_runner: Any, index: SuffixIndex, draws: bool, drafter: Callable[..., Any] | None = None):
        """draws: see SuffixIndex.draft; may change. drafter: takes the arguments of propose_draft_token_ids, and returns drafts of
        the scheduler output's length. Without one, vLLM takes this object for its look-up of n-grams."""
        self.index, self.draws = index, draws
        self._runner, self._drafter = model_runner, drafter
        self._take, self._proposer = model_runner.take_draft_token_ids, ""
        self._of_match = [ServedAcceptance(model_runner.num_spec_tokens) for _ in (*MATCHES, None)]
        self._proposals: dict[str, Proposal] = {}
        self._keys: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        model_runner.propose_draft_token_ids = self.propose
        model_runner.take_draft_token_ids = self.take_draft_token_ids

    def add(self, rollouts: list[tuple[list[int], list[int]]]) -> None:
        """Add finished rollouts to the index: the token ids of each prompt and of its response, emitted ones only."""
        for prompt, response in rollouts:
            self.index.add(key_of(prompt), response)

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
        runner, plan = self._runner, attached(scheduler_output)
        request_ids = list(runner.input_batch.req_ids)
        texts = self._texts(sampled, len(request_ids))
        self._learn(scheduler_output.scheduled_spec_decode_tokens, dict(zip(request_ids, texts, strict=True)))
        draws = self.draws and not sampling_metadata.all_greedy
        greedy = [not draws] * len(texts)
        if draws and not sampling_metadata.all_random:
            greedy = [temperature < 1e-5 for temperature in sampling_metadata.temperature.tolist()]
        drafts = self._drafts(plan, request_ids, texts, greedy, scheduler_output.num_spec_tokens_to_schedule)
        self._proposer = "" if drafts is None else "history"
        if self._drafter is not None:
            step = copy.copy(scheduler_output)
            step.num_spec_tokens_to_schedule = plan.drafter_length if drafts is None else 0
            of_drafter = self._drafter(step, sampled, sampling_metadata, *rest)
            if drafts is None:
                self._proposer = "drafter" if plan.drafter_length else ""
                return of_drafter
        drafts = drafts or [None] * len(texts)
        if sampling_metadata.all_greedy or not any(drafts):
            runner._draft_probs = runner._draft_prob_req_ids = None
        else:
            runner._draft_probs, runner._draft_prob_req_ids = self._distributions(drafts, greedy), request_ids
        return [[] if draft is None else draft.tokens.tolist() for draft in drafts]

    def _drafts(
        self, plan: Plan, request_ids: list[str], texts: list[Text], greedy: list[bool], k: int
    ) -> list[Draft | None] | None:
        """Return each request's draft from history, or None where this step has none from history."""
        probes, other = plan.probes == "history", self._drafter is not None and plan.probes == "drafter"
        by_match = [acceptance.best(plan.ratios, k) for acceptance in self._of_match]
        if other or not (probes or any(choice.length for choice in by_match)):  # a look-up takes time too
            return None
        drafts = [
            self._draft(request, text, k, not likeliest) if text.num_new and k else None
            for request, text, likeliest in zip(request_ids, texts, greedy, strict=True)
        ]
        choices = [NOTHING if draft is None else by_match[match_class(draft.match)] for draft in drafts]
        rival = 1.0 if self._drafter is None else max(1.0, plan.drafter_speed)
        if not probes and speed_of(choices, plan.ratios) <= rival:
            return None
        lengths = [min(choice.length + probes, k) for choice in choices]
        for i, (request, draft, length) in enumerate(zip(request_ids, drafts, lengths, strict=True)):
            if draft is not None and length:
                drafts[i] = draft = draft.first(length)
                self._proposals[request] = Proposal(match_class(draft.match), length, len(draft.tokens))
            else:
                drafts[i] = None
        return drafts

    def _texts(self, sampled: Any, num_requests: int) -> list[Text]:
        """Return every request's text with what this step has emitted.

        vLLM calls a drafter before it adds the new tokens to its batch, with a tensor [R, 1 or more] that is -1 where there is
        no token. It calls the n-gram look-up afterwards, with lists.
        """
        batch, discarded = self._runner.input_batch, self._runner.discard_request_mask.np
        is_entered = not torch.is_tensor(sampled)
        texts = []
        for i, row in enumerate(sampled if is_entered else sampled.tolist()):
            length, prompt_length = int(batch.num_tokens_no_spec[i]), int(batch.num_prompt_tokens[i])
            new = [] if discarded[i] else [token for token in row if token >= 0]
            tokens = batch.token_ids_cpu[i, :length]
            if not is_entered:
                tokens = np.append(tokens, np.array(new, np.int32))
            texts.append(Text(tokens, prompt_length, len(new)))
        return texts[:num_requests]

    def _learn(self, verified: dict[str, list[int]], texts: dict[str, Text]) -> None:
        """Count how many draft tokens of the step before were accepted. verified: draft tokens by request."""
        for request in self._keys.keys() - self._runner.requests.keys():  # they have ended
            self._proposals.pop(request, None)
            del self._keys[request]
        for request, text in texts.items():
            proposal, drafted = self._proposals.pop(request, None), len(verified.get(request, ()))
            if not (drafted and text.num_new):
                continue  # vLLM drops drafts of requests that it computes again
            accepted = min(text.num_new - 1, drafted)
            if proposal is not None:
                was_cut = drafted < proposal.num_drafted
                self._of_match[proposal.match].observe([(drafted if was_cut else proposal.num_tokens, accepted)])
            name = "drafter" if proposal is None else "history"
            self._counts[f"{name}/drafts"] += 1
            self._counts[f"{name}/drafted_tokens"] += drafted
            self._counts[f"{name}/accepted_tokens"] += accepted

    def _draft(self, request: str, text: Text, k: int, draws: bool) -> Draft | None:
        key = self._keys.get(request)
        if key is None:
            key = self._keys[request] = key_of(text.tokens[: text.prompt_length])
        draft = self.index.draft(key, text.tokens, text.prompt_length, k, draws)
        return draft if len(draft.tokens) else None

    def _distributions(self, drafts: list[Draft | None], greedy: list[bool]) -> torch.Tensor:
        """Return the distributions that the drafts come from, for vLLM's rejection sampler [R, longest draft, V].

        A token that was not drawn has all the probability of its distribution.
        """
        longest, size = max(len(draft.tokens) for draft in drafts if draft), self._runner.input_batch.vocab_size
        places, values = [], []  # flat indices into [R, longest draft, V], and the probabilities there
        for i, draft in enumerate(drafts):
            for j, token in enumerate(() if draft is None else draft.tokens):
                assert draft is not None
                tokens, probabilities = draft.distribution(j)
                if greedy[i]:
                    tokens, probabilities = np.array([token]), np.ones(1)
                places.append((i * longest + j) * size + tokens.astype(np.int64))
                values.append(probabilities)
        dense = torch.zeros(len(drafts), longest, size, device=self._runner.device)
        where = torch.from_numpy(np.concatenate(places)).to(dense.device)
        dense.view(-1)[where] = torch.from_numpy(np.concatenate(values, dtype=np.float32)).to(dense.device)
        return dense


def match_class(match: int) -> int:
    """Return the index of the class of MATCHES that a match of this length belongs to."""
    return bisect(MATCHES, match)


def speed_of(choices: Sequence[Choice], ratios: Sequence[float] | None) -> float:
    """Return the expected decoding speed of a step relative to no speculation; without step costs, the expected tokens."""
    length = sum(choice.length for choice in choices) / len(choices)
    tokens = sum(choice.tokens for choice in choices) / len(choices)
    return tokens if ratios is None else tokens / ratio_at(ratios, length)
