"""A system, and what comes out of it: seconds of its generation and of its step, with speculation and without."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from cotrain.simulation.generation import Acceptance, Ints, generate
from cotrain.simulation.roofline import StepTimes
from cotrain.simulation.step_time import Array, MeasuredCells
from cotrain.simulation.system import RooflineCost, System, seconds_by_cell


@dataclass(frozen=True)
class Scenario:
    system: System

    def changed(self, section: str, **fields: Any) -> "Scenario":
        """Return the scenario with other fields of this section."""
        part = getattr(self.system, section).model_copy(update=fields)
        return Scenario(self.system.model_copy(update={section: part}))

    @cached_property
    def plain(self) -> "Scenario":
        """The scenario without speculation."""
        return Scenario(self.system.model_copy(update={"drafter": None}))

    @cached_property
    def cost(self) -> StepTimes:
        return self.system.cost.step_times()

    @cached_property
    def acceptance(self) -> Acceptance:
        return self.system.drafter.acceptance() if self.system.drafter else Acceptance([0.0])

    @cached_property
    def queues(self) -> Ints:
        """[steps times engines, most responses of an engine] tokens of responses in the order in which they begin, then zeros.

        Prompts go to the engines in turn, with all their responses.
        """
        steps, engines = self.system.workload.lengths(), self.system.system.engines
        shares = ([*chain(*groups[engine::engines])] for groups in steps for engine in range(engines))
        return np.array([*zip_longest(*shares, fillvalue=0)]).T

    @cached_property
    def batches(self) -> Ints:
        """Batch sizes that an engine goes through."""
        return np.arange(min(self.system.system.max_num_seqs, self.queues.shape[1])) + 1

    def step_time(self, k: int) -> Array:
        """[batches] seconds of a decode step of requests whose context is the mean over all tokens generated."""
        lengths = self.queues.astype(float)
        context = self.system.workload.prompt_tokens + float((lengths**2).sum() / lengths.sum()) / 2
        return self.cost.base(k, self.batches.astype(float)) + self.cost.slope(k) * self.batches * context

    @cached_property
    def draft_lengths(self) -> list[int]:
        """Draft tokens by batch size, from 0 on. When adaptive, those that give the most tokens per second, the least of equals."""
        drafter = self.system.drafter
        if drafter is None or not drafter.adaptive:
            return [drafter.k if drafter else 0] * (len(self.batches) + 1)
        speeds = [self.acceptance.length(k) / self.step_time(k) for k in range(drafter.k + 1)]
        best = np.argmax(speeds, axis=0).tolist()
        return [best[0], *best]

    @property
    def envelope(self) -> bool:
        """Do times of steps with drafts come from a roofline that was not adjusted to measured steps with drafts this long?"""
        if not isinstance(cost := self.system.cost, RooflineCost) or not self.system.drafter:
            return False
        return max(1, *self.draft_lengths) > max([0, *cost.drafted_k, *(k for k, *_ in cost.cells)])

    @property
    def extrapolated(self) -> list[int]:
        """Batch sizes beyond what was measured; none where nothing was."""
        cells, k = self.system.cost.cells, self.draft_lengths
        covers = MeasuredCells(seconds_by_cell(cells)).covers
        return [b for b in self.batches.tolist() if cells and not (covers(k[b], b) and covers(0, b))]

    @cached_property
    def generation(self) -> float:
        """Simulated mean seconds until the slowest engine has generated its part of a step."""
        prompts, engines = self.system.workload.prompt_tokens, self.system.system.engines
        seconds = generate(self.cost, self.acceptance, self.draft_lengths, self.queues, prompts)
        return float(seconds.reshape(-1, engines).max(1).mean())

    @property
    def speedup(self) -> float:
        """Speed of generation relative to no speculation."""
        return self.plain.generation / self.generation

    @property
    def learning(self) -> float:
        """Seconds of a step besides generation."""
        drafter = self.system.drafter
        return self.system.system.learner_seconds + (drafter.training_seconds if drafter else 0.0)

    def step(self, lag: int | None = None) -> float:
        """Seconds of a step. With lag, generation runs beside the learner, and a steady step takes the longer of both."""
        lagging = self.system.system.lag if lag is None else lag
        return max(self.generation, self.learning) if lagging else self.generation + self.learning
