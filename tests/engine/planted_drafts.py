"""Faults of drafting from history, planted inside a running vLLM worker and taken out again."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.suffix_index import distribution
from cotrain.engine.history import HistoryDrafting, Proposal, Step
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.worker import EngineWorker
from cotrain.engine.worker_extension import CotrainWorker
from drafters.suffix.index import Drafts

Fault = Callable[[Drafts], Drafts]

LENGTHS = "lengths"
"""No fault: the requests draft 0 to k tokens in turn."""

PRICES = "prices"
"""No fault: the scheduler's step ratios count as those of a machine on which each draft token costs a third of a step."""


class Planting(EngineWorker):
    """A worker whose index lies about its drafts on request."""

    def plant(self, fault: str | None) -> None:
        """Take out what was planted before, then plant this one; None leaves the worker clean."""
        history, runner = self.history, self.worker.model_runner
        index = history.index
        index.__dict__.pop("draft", None)
        history.__dict__.pop("_drafts", None)
        runner.propose_draft_token_ids = history.propose
        if fault == PRICES:
            runner.propose_draft_token_ids = functools.partial(_priced, history.propose)
        elif fault == LENGTHS:
            history._drafts = functools.partial(_in_turn, history, itertools.count())
        elif fault is not None:
            draft = index.draft
            index.draft = lambda *args: FAULTS[fault](draft(*args))


class PlantingWorker(CotrainWorker):
    cotrain_worker = functools.cached_property(Planting)


def _priced(propose: Callable[..., Any], scheduler_output: Any, *rest: Any) -> Any:
    plan: Plan = scheduler_output.cotrain
    if plan.ratios is not None:
        scheduler_output.cotrain = plan._replace(ratios=[1 + k / 3 for k in range(len(plan.ratios))])
    return propose(scheduler_output, *rest)


def _in_turn(history: HistoryDrafting, numbers: Iterator[int], plan: Plan, step: Step, *rest: Any) -> Any:
    drafts = HistoryDrafting._drafts(history, plan._replace(probes=True), step, *rest)
    if drafts is None:
        return None
    lengths = [next(numbers) % (num + 1) if num else 0 for num in drafts.nums.tolist()]
    for request, length in zip(step.requests, lengths, strict=True):
        if length:
            history._proposals[request] = Proposal(0, length, length)
    return drafts.first(np.array(lengths))


def sharpened(drafts: Drafts) -> Drafts:
    """The distribution that is handed over is sharper than the one that was drawn from."""
    laws = drafts.probabilities.copy()
    for i, num in enumerate(drafts.nums):
        for law, size in zip(laws[i, :num], drafts.sizes[i, :num], strict=True):
            law[:size] = law[:size] ** 2 / (law[:size] ** 2).sum()
    return drafts._replace(probabilities=laws)


def anticipates(drafts: Drafts) -> Drafts:
    """A draft ends before a token that has turned out to be an unlikely one."""
    likely = [
        [distribution(drafts, i, j)[token] >= 0.3 for j, token in enumerate(tokens)]
        for i, tokens in enumerate(drafts.lists())
    ]
    return drafts.first(np.array([[*of_request, False].index(False) for of_request in likely]))


def another_requests_law(drafts: Drafts) -> Drafts:
    """A request's tokens come with the distributions of the request before it."""
    before = np.roll(np.arange(len(drafts.nums)), 1)
    others = drafts._replace(**{name: getattr(drafts, name)[before] for name in ("supports", "probabilities", "sizes")})
    return others.first(drafts.nums[before])


FAULTS: dict[str, Fault] = {f.__name__: f for f in (sharpened, anticipates, another_requests_law)}
