"""Drafting from history inside vLLM's model runner (0.32, V1): alone, or beside a drafter with a choice for each request.

Like hooks.py, it is for the V1 model runner only. The index imports numba, which is why the worker imports this module
only after vLLM has started.
"""

from bisect import bisect
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cotrain.engine.interface import attach, attached
from cotrain.engine.speculation.draft_length import Plan, Proposed
from cotrain.engine.speculation.served_acceptance import Choice, ServedAcceptance
from cotrain.engine.speculation.step_costs import ratio_at
from drafters.suffix.index import Draft, SuffixIndex, key_of

MATCHES = (2, 4, 8, 16)
"""Bounds of the match lengths whose acceptance is counted separately: up to 1 token, 2 or 3, and so on."""

NOTHING = Choice(0, 1.0, 0.0)


class Asked(NamedTuple):
    """What was drafted for one request, until it is known how much of it was accepted."""

    match: int | None
    """Class of the match that the draft from the index follows; None for a draft from the drafter."""
    num_tokens: int
    """Draft tokens asked for. The index may have had fewer, which counts as if the others had been rejected."""
    num_drafted: int


class Text(NamedTuple):
    """Text of a request at the end of a step."""

    tokens: NDArray[np.int32]
    """Prompt and response [n]."""
    prompt_length: int
    num_new: int
    """Number of tokens that the step has emitted; 0 while the prompt is computed."""


class HistoryDrafting:
    """Replaces the runner's propose_draft_token_ids, or the hook that has already replaced it.

    Which proposer a request gets is decided by the length of its match and by acceptance so far. Both are known before
    any token of the draft is drawn, so the emitted tokens keep their distribution.
    """

    def __init__(self, model_runner: Any, index: SuffixIndex, is_alone: bool, draws: bool):
        """is_alone: without a drafter, where vLLM takes this for its n-gram look-up. draws: see SuffixIndex.draft; may change."""
        self.index = index
        self._plan: Plan = Plan("", None, False)
        self._runner, self._propose = model_runner, model_runner.propose_draft_token_ids
        self._take, self._has_passes = model_runner.take_draft_token_ids, not is_alone
        self._is_alone, self.draws = is_alone, draws
        longest = model_runner.num_spec_tokens
        self._of_drafter = ServedAcceptance(longest)
        self._of_match = [ServedAcceptance(longest) for _ in (*MATCHES, None)]
        self._asked: dict[str, Asked] = {}
        self._keys: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._num_probes = 0
        model_runner.propose_draft_token_ids = self._hooked
        model_runner.take_draft_token_ids = self._take_draft_token_ids

    def new_drafter(self, expected_rates: list[float] | None) -> None:
        """Forget the drafter's acceptance: another one serves. expected_rates: see ServedAcceptance; None if none are known."""
        self._of_drafter = ServedAcceptance(self._runner.num_spec_tokens, expected_rates or ())

    def add(self, rollouts: list[tuple[list[int], list[int]]]) -> None:
        """Add finished rollouts to the index: the token ids of each prompt and of its response, emitted ones only."""
        for prompt, response in rollouts:
            self.index.add(key_of(prompt), response)

    def take_report(self) -> dict[str, dict[str, float]]:
        """Return counts (drafts, draft tokens, accepted ones by proposer since the last call) and state (size)."""
        counts, self._counts = self._counts, Counter()
        state: dict[str, float] = {"history/tokens": self.index.num_tokens, "history/bytes": self.index.num_bytes}
        return {"counts": dict(counts), "state": state}

    def _hooked(self, scheduler_output: Any, sampled: Any, sampling_metadata: Any, *rest: Any) -> Any:
        runner, k = self._runner, scheduler_output.num_spec_tokens_to_schedule
        self._plan = attached(scheduler_output)
        request_ids = list(runner.input_batch.req_ids)
        texts = self._texts(sampled, len(request_ids))
        self._learn(scheduler_output, dict(zip(request_ids, texts, strict=True)))
        draws = self.draws and not sampling_metadata.all_greedy
        greedy = [not draws] * len(texts)
        if draws and not sampling_metadata.all_random:
            greedy = [temperature < 1e-5 for temperature in sampling_metadata.temperature.tolist()]
        taken, lengths = self._propose_from_history(request_ids, texts, greedy, k)
        asking = [length for draft, length in zip(taken, lengths, strict=True) if draft is None]
        of_drafter = self._of_model(scheduler_output, sampled, sampling_metadata, rest, max(asking, default=0))
        for request, text, draft, length in zip(request_ids, texts, taken, lengths, strict=True):
            if text.num_new and length and draft is not None:
                self._asked[request] = Asked(match_class(draft.match), length, min(length, len(draft.tokens)))
            elif text.num_new and length and not self._is_alone:
                self._asked[request] = Asked(None, length, length)
        if not self._is_alone and set(lengths) == {k} and not any(draft is not None for draft in taken):
            return of_drafter
        rows = of_drafter.tolist() if torch.is_tensor(of_drafter) else of_drafter or [[]] * len(texts)
        rows = [
            (row[:length] if text.num_new else []) if draft is None else draft.tokens[:length].tolist()
            for row, draft, text, length in zip(rows, taken, texts, lengths, strict=True)
        ]
        self._hand_over_laws(request_ids, rows, taken, greedy, sampling_metadata)
        return rows

    def _propose_from_history(
        self, request_ids: list[str], texts: list[Text], greedy: list[bool], k: int
    ) -> tuple[list[Draft | None], list[int]]:
        """Return each request's draft from history, or None where the drafter proposes, and how many tokens it drafts.

        While steps are measured, requests draft the full length. For "history", fillers stand for its drafts.
        """
        ratios, probes = self._plan.ratios, self._plan.probes
        if self._plan.measures:
            fills = self._plan.measures == "history" and k > 0
            return [filler(text, k) if fills else None for text in texts], [k] * len(texts)
        self._num_probes += probes
        # One batch, so all requests have the same ratios, and a draft from history is judged by the length of its match alone.
        for_history, for_drafter = (None, None) if ratios is None else (ratios["history"], ratios.get("drafter"))
        of_match = [kind.best(for_history, k) for kind in self._of_match]
        of_drafter = NOTHING if self._is_alone else self._of_drafter.best(for_drafter, k)
        if not probes and not any(choice.length for choice in (*of_match, of_drafter)):  # a look-up takes time too
            return [None] * len(texts), [0] * len(texts)
        drafts = [
            self._draft(request, text, k, not likeliest) if text.num_new and k else None
            for request, text, likeliest in zip(request_ids, texts, greedy, strict=True)
        ]
        best = [NOTHING if draft is None else of_match[match_class(draft.match)] for draft in drafts]
        alone = list(zip(drafts, best, strict=True))
        both = [self._choose(draft, choice, of_drafter) for draft, choice in alone]
        if probes:
            choices = [self._probe(draft, choice, of_drafter, k) for draft, choice in alone]
        elif ratios is None:
            choices = both
        else:
            none: list[tuple[Draft | None, Choice]] = [(None, NOTHING)] * len(texts)
            choices = max(none, alone, both, key=lambda plan: self._speed(plan, ratios))
        return [draft for draft, _ in choices], [choice.length for _, choice in choices]

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

    def _learn(self, scheduler_output: Any, texts: dict[str, Text]) -> None:
        """Count how many draft tokens of the step before were accepted."""
        for request in self._keys.keys() - self._runner.requests.keys():  # they have ended
            self._asked.pop(request, None)
            del self._keys[request]
        verified = scheduler_output.scheduled_spec_decode_tokens
        for request, text in texts.items():
            asked, drafted = self._asked.pop(request, None), len(verified.get(request, ()))
            if asked is None or not (drafted and text.num_new) or self._plan.measures:
                continue  # vLLM drops drafts of requests that it computes again
            accepted = min(text.num_new - 1, drafted)
            name = "drafter" if asked.match is None else "history"
            counts = self._of_drafter if asked.match is None else self._of_match[asked.match]
            counts.observe([(drafted if drafted < asked.num_drafted else asked.num_tokens, accepted)])
            self._counts[f"{name}/drafts"] += 1
            self._counts[f"{name}/drafted_tokens"] += drafted
            self._counts[f"{name}/accepted_tokens"] += accepted

    def _draft(self, request: str, text: Text, k: int, draws: bool) -> Draft | None:
        key = self._keys.get(request)
        if key is None:
            key = self._keys[request] = key_of(text.tokens[: text.prompt_length])
        draft = self.index.draft(key, text.tokens, text.prompt_length, k, draws)
        return draft if len(draft.tokens) else None

    def _choose(self, draft: Draft | None, of_match: Choice, of_drafter: Choice) -> tuple[Draft | None, Choice]:
        """Return (the draft, or None for the drafter; how much to draft): whichever is worth more."""
        takes = draft is not None and (self._is_alone or of_match.worth > of_drafter.worth)
        return (draft, of_match) if takes else (None, of_drafter)

    def _probe(self, draft: Draft | None, of_match: Choice, of_drafter: Choice, k: int) -> tuple[Draft | None, Choice]:
        """Draft a token more than is worth the most, with the proposers in turn."""
        takes = draft is not None and (self._is_alone or self._num_probes % 2 == 1)
        choice = of_match if takes else of_drafter
        return draft if takes else None, choice._replace(length=min(choice.length + 1, k))

    def _speed(self, choices: list[tuple[Draft | None, Choice]], ratios: dict[str, list[float]]) -> float:
        """Return the expected decoding speed of a step relative to no speculation.

        The requests that do not use the drafter wait for its passes all the same.
        """
        of_history, longest = ratios["history"], max((c.length for draft, c in choices if draft is None), default=0)
        passes = ratios.get("drafter", of_history)[longest] - of_history[longest]
        length = sum(choice.length for _, choice in choices) / len(choices)
        tokens = sum(choice.tokens for _, choice in choices) / len(choices)
        return tokens / (ratio_at(of_history, length) + max(0.0, passes))

    def _take_draft_token_ids(self) -> Any:
        taken = self._take()
        if taken is not None:
            of_history = {name for name, asked in self._asked.items() if asked.match is not None}
            attach(taken, Proposed(self._has_passes, of_history))
        return taken

    def _of_model(self, scheduler_output: Any, sampled: Any, sampling_metadata: Any, rest: Any, longest: int) -> Any:
        """Return the drafter's proposal, with as many tokens as any request asks for; at 0 its pass is left out."""
        if self._is_alone:
            self._runner._draft_probs = self._runner._draft_prob_req_ids = None
            return None
        self._has_passes = longest > 0
        k = scheduler_output.num_spec_tokens_to_schedule
        scheduler_output.num_spec_tokens_to_schedule = longest
        try:
            return self._propose(scheduler_output, sampled, sampling_metadata, *rest)
        finally:
            scheduler_output.num_spec_tokens_to_schedule = k

    def _hand_over_laws(
        self,
        request_ids: list[str],
        rows: list[list[int]],
        taken: list[Draft | None],
        greedy: list[bool],
        metadata: Any,
    ) -> None:
        """Give vLLM's rejection sampler the distributions [R, longest draft, V] that the draft tokens come from.

        A token that was not drawn has all the probability of its distribution.
        """
        runner, most = self._runner, max(map(len, rows), default=0)
        if metadata.all_greedy or not most:
            runner._draft_probs = runner._draft_prob_req_ids = None
            return
        before: Tensor | None = runner._draft_probs
        laws = torch.zeros(len(rows), most, runner.input_batch.vocab_size, device=runner.device)
        places, values = [np.zeros(0, np.int64)], [np.zeros(0)]  # flat indices into laws, and the values there
        for i, (row, draft) in enumerate(zip(rows, taken, strict=True)):
            starts = (i * most + np.arange(len(row))) * laws.shape[2]
            if draft is None and before is not None:
                laws[i, : len(row)] = before[i, : len(row)]
            elif draft is None or greedy[i]:
                places.append(starts + np.array(row, np.int64))
                values.append(np.ones(len(row)))
            else:
                for j, (start, size) in enumerate(zip(starts, draft.sizes, strict=False)):
                    places.append(start + draft.supports[j, :size])
                    values.append(draft.laws[j, :size])
        where = torch.from_numpy(np.concatenate(places, dtype=np.int64)).to(runner.device)
        laws.view(-1)[where] = torch.from_numpy(np.concatenate(values, dtype=np.float32)).to(runner.device)
        runner._draft_probs, runner._draft_prob_req_ids = laws, request_ids


def filler(text: Text, k: int) -> Draft | None:
    """Return a draft that costs what any other does, the last token k times, or None while the prompt is computed."""
    tokens = np.repeat(text.tokens[-1:], k)
    return Draft(tokens, tokens[:, None], np.ones((k, 1)), np.ones(k, np.int32), 0) if text.num_new else None


def match_class(match: int) -> int:
    """Return the index of the class of MATCHES that a match of this length belongs to."""
    return bisect(MATCHES, match)
