"""Faults of drafting from history, planted inside a running vLLM worker and taken out again."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cotrain.engine.interface import attach, attached
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import Choice
from cotrain.engine.worker import EngineWorker
from cotrain.engine.worker_extension import CotrainWorker
from drafters.suffix.index import Draft

Fault = Callable[[Draft], Draft]

LENGTHS = "lengths"
"""No fault: the requests of a step draft 0 to k tokens in turn, of the index and of the drafter if there is one."""

PRICES = "prices"
"""No fault: the scheduler's step ratios count as those of a machine on which each draft token costs a third of a step."""


OF_ANOTHER_REQUEST = "drafters_law_of_another_request"
"""The same, and the drafter's tokens of a request come with its laws of the request before."""


class Planting(EngineWorker):
    """A worker whose index lies about its drafts on request."""

    def plant(self, fault: str | None) -> None:
        """Take out what was planted before, then plant this one; None leaves the worker clean."""
        history, runner = self.history, self.worker.model_runner
        index = history.index
        index.__dict__.pop("draft", None)
        for name in ("_choose", "_hand_over_laws"):
            history.__dict__.pop(name, None)
        runner.propose_draft_token_ids = history._hooked
        if fault == PRICES:
            runner.propose_draft_token_ids = functools.partial(_priced, history._hooked)
        elif fault in (LENGTHS, OF_ANOTHER_REQUEST):
            most = runner.num_spec_tokens
            history._choose = functools.partial(_in_turn, history._is_alone, most, itertools.count())
            if fault == OF_ANOTHER_REQUEST:
                history._hand_over_laws = functools.partial(_rolled, runner, history._hand_over_laws)
        elif fault is not None:
            draft = index.draft
            index.draft = lambda *args: FAULTS[fault](draft(*args))


class PlantingWorker(CotrainWorker):
    cotrain_worker = functools.cached_property(Planting)


def _priced(propose: Callable[..., Any], scheduler_output: Any, *rest: Any) -> Any:
    plan: Plan = attached(scheduler_output)
    if plan.ratios is not None:
        ratios = {proposer: [1 + k / 3 for k in range(len(of_it))] for proposer, of_it in plan.ratios.items()}
        attach(scheduler_output, plan._replace(ratios=ratios))
    return propose(scheduler_output, *rest)


def _in_turn(
    is_alone: bool, most: int, numbers: Iterator[int], draft: Draft | None, *_: Any
) -> tuple[Draft | None, Choice]:
    turn, length = divmod(next(numbers), most + 1)
    return draft if is_alone or turn % 2 else None, Choice(length, 1.0, 0.0)


def _rolled(runner: Any, hand_over: Callable[..., None], *args: Any) -> None:
    if runner._draft_probs is not None:
        runner._draft_probs = runner._draft_probs.roll(1, 0)
    hand_over(*args)


def sharpened(draft: Draft) -> Draft:
    """The law that is handed over is sharper than the one that was drawn from."""
    laws = draft.laws.copy()
    for j, size in enumerate(draft.sizes):
        laws[j, :size] = laws[j, :size] ** 2 / (laws[j, :size] ** 2).sum()
    return draft._replace(laws=laws)


def anticipates(draft: Draft) -> Draft:
    """A draft ends before a token that has turned out to be an unlikely one."""
    for j, size in enumerate(draft.sizes):
        if draft.laws[j, :size][draft.supports[j, :size] == draft.tokens[j]].item() < 0.3:
            return Draft(draft.tokens[:j], draft.supports[:j], draft.laws[:j], draft.sizes[:j], draft.match)
    return draft


_before: list[Draft] = []


def another_requests_law(draft: Draft) -> Draft:
    """A request's tokens come with the laws of the request before it."""
    _before.append(draft)
    other = _before.pop(0) if len(_before) > 1 else draft
    n = min(len(draft.tokens), len(other.tokens))
    laws, supports, sizes = other.laws[:n].copy(), other.supports[:n].copy(), np.array(other.sizes[:n])
    return Draft(draft.tokens[:n], supports, laws, sizes, draft.match)


FAULTS: dict[str, Fault] = {f.__name__: f for f in (sharpened, anticipates, another_requests_law)}
