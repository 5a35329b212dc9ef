"""Faults of drafting from history, planted inside a running vLLM worker and taken out again."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cotrain.engine.history import HistoryDrafting, Proposal
from cotrain.engine.interface import attach, attached
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.worker import EngineWorker
from cotrain.engine.worker_extension import CotrainWorker
from drafters.suffix.index import Draft

Fault = Callable[[Draft], Draft]

LENGTHS = "lengths"
"""No fault: history and the drafter, if there is one, draft in turn, and of history the requests draft 0 to k tokens in turn."""

PRICES = "prices"
"""No fault: the scheduler's step ratios count as those of a machine on which each draft token costs a third of a step."""

OF_ANOTHER_REQUEST = "drafters_distribution_of_another_request"
"""As LENGTHS, and the drafter's tokens of a request come with its distributions of the request before."""


class Planting(EngineWorker):
    """A worker whose index lies about its drafts on request."""

    def plant(self, fault: str | None) -> None:
        """Take out what was planted before, then plant this one; None leaves the worker clean."""
        history, runner = self.history, self.worker.model_runner
        index = history.index
        index.__dict__.pop("draft", None)
        history.__dict__.pop("_drafts", None)
        history._drafter = getattr(self, "clean_drafter", history._drafter)
        runner.propose_draft_token_ids = history.propose
        if fault == PRICES:
            runner.propose_draft_token_ids = functools.partial(_priced, history.propose)
        elif fault in (LENGTHS, OF_ANOTHER_REQUEST):
            history._drafts = functools.partial(_in_turn, history, itertools.count(), itertools.count())
            if fault == OF_ANOTHER_REQUEST:
                self.clean_drafter = history._drafter
                history._drafter = functools.partial(_rolled, runner, history._drafter)
        elif fault is not None:
            draft = index.draft
            index.draft = lambda *args: FAULTS[fault](draft(*args))


class PlantingWorker(CotrainWorker):
    cotrain_worker = functools.cached_property(Planting)


def _priced(propose: Callable[..., Any], scheduler_output: Any, *rest: Any) -> Any:
    plan: Plan = attached(scheduler_output)
    if plan.ratios is not None:
        attach(scheduler_output, plan._replace(ratios=[1 + k / 3 for k in range(len(plan.ratios))]))
    return propose(scheduler_output, *rest)


def _in_turn(
    history: HistoryDrafting, steps: Iterator[int], numbers: Iterator[int], plan: Plan, requests: Any, *rest: Any
) -> Any:
    if history._drafter is not None and next(steps) % 2:
        return None
    drafts = HistoryDrafting._drafts(history, plan._replace(probes="history"), requests, *rest)
    for i, (request, draft) in enumerate(zip(requests, drafts or [], strict=False)):
        if draft is not None:
            length = next(numbers) % (len(draft.tokens) + 1)
            drafts[i] = draft.first(length) if length else None
            history._proposals[request] = Proposal(0, length, length)
    return drafts


def _rolled(runner: Any, drafter: Callable[..., Any], *args: Any) -> Any:
    drafts = drafter(*args)
    if runner._draft_probs is not None:
        runner._draft_probs = runner._draft_probs.roll(1, 0)
    return drafts


def sharpened(draft: Draft) -> Draft:
    """The distribution that is handed over is sharper than the one that was drawn from."""
    laws = draft.probabilities.copy()
    for j, size in enumerate(draft.sizes):
        laws[j, :size] = laws[j, :size] ** 2 / (laws[j, :size] ** 2).sum()
    return draft._replace(probabilities=laws)


def anticipates(draft: Draft) -> Draft:
    """A draft ends before a token that has turned out to be an unlikely one."""
    for j, size in enumerate(draft.sizes):
        if draft.probabilities[j, :size][draft.supports[j, :size] == draft.tokens[j]].item() < 0.3:
            return Draft(draft.tokens[:j], draft.supports[:j], draft.probabilities[:j], draft.sizes[:j], draft.match)
    return draft


_before: list[Draft] = []


def another_requests_law(draft: Draft) -> Draft:
    """A request's tokens come with the distributions of the request before it."""
    _before.append(draft)
    other = _before.pop(0) if len(_before) > 1 else draft
    n = min(len(draft.tokens), len(other.tokens))
    laws, supports, sizes = other.probabilities[:n].copy(), other.supports[:n].copy(), np.array(other.sizes[:n])
    return Draft(draft.tokens[:n], supports, laws, sizes, draft.match)


FAULTS: dict[str, Fault] = {f.__name__: f for f in (sharpened, anticipates, another_requests_law)}
