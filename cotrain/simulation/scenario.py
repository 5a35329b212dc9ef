"""A system and its work as numbers, and what speculation makes of a step: the arm beside its twin without speculation."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.rollout import DraftLengths, Engines, Generation, Ints, Order, Prices, deal, generate
from cotrain.simulation.schedule import Schedule, schedule
from cotrain.simulation.step_time import Array, Paced, StepTime

DRAWS = 32
"""Draws that an interval rests on. They spread evenly over the errors, so that more of them move its ends by little."""

MOST_COMPARED = 7
"""Longest draft that is compared with a scenario's own, unless that is longer."""


@dataclass(frozen=True)
class Scenario:
    cost: StepTime
    engines: Engines
    lengths: list[list[int]]
    """Response tokens of each prompt's samples, step after step."""
    prompt_tokens: int
    acceptance: Acceptance | None
    k: DraftLengths
    steps: int = 1
    """Steps that the lengths are of. Each is simulated, and answers are means over them."""
    step_time_error: float = 0.0
    """Relative standard error of what a speculating step takes over a plain one."""
    acceptance_error: float = 0.0
    """Relative standard error of the acceptance length."""
    order: Order = "drawn"
    learner_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage of a step but generation."""
    generation_overhead: float = 0.0
    """Seconds of generation in a step beside those of the engines' steps."""
    lag: int = 0
    """Steps that generation may be ahead of the learner; 0 is synchronous."""
    sync_seconds: float = 0.0
    drafter_seconds: float = 0.0
    """Drafter training that a step waits for."""
    drafted_k: tuple[int, ...] = ()
    """Draft lengths of the measured steps that a roofline was adjusted to."""

    @property
    def speculates(self) -> bool:
        """Does it draft, or may it where that pays?"""
        return self.acceptance is not None and self.k != 0

    @property
    def envelope(self) -> bool:
        """Does it speculate, or not, by a roofline that was adjusted to no measured step with drafts as long as its own?"""
        known = max((0, *self.drafted_k))
        return self.cost.origin == "roofline" and self.speculates and max(self.most_drafted, 1) > known

    @cached_property
    def each(self) -> list["Scenario"]:
        """Its steps one by one."""
        cuts = [step * len(self.lengths) // self.steps for step in range(self.steps + 1)]
        return [replace(self, lengths=self.lengths[a:b], steps=1) for a, b in pairwise(cuts)]

    @cached_property
    def flat(self) -> Ints:
        return np.concatenate([np.asarray(group, np.int64) for group in self.lengths])

    @property
    def samples(self) -> int:
        """Samples of each prompt. It is 1 where prompts differ in it: their responses are then dealt out one by one."""
        sizes = {len(group) for group in self.lengths}
        return sizes.pop() if len(sizes) == 1 else 1

    @cached_property
    def shares(self) -> list[Ints]:
        """Response tokens of each engine's requests in a scenario of one step, in the order in which they begin."""
        return [self.flat[share] for share in deal(self.flat, self.engines.count, self.samples, self.order)]

    @cached_property
    def batches(self) -> Ints:
        """Batch sizes that an engine goes through."""
        most = max(len(share) for step in self.each for share in step.shares)
        return np.arange(min(self.engines.max_num_seqs, most)) + 1

    @cached_property
    def mean_context(self) -> float:
        """Tokens of context of a running request, mean over all tokens generated."""
        return self.prompt_tokens + float((self.flat.astype(float) ** 2).sum() / self.flat.sum()) / 2

    @property
    def most_drafted(self) -> int:
        return self.k if isinstance(self.k, int) else max(self.k)

    @property
    def draft_lengths(self) -> list[int]:
        """Those to compare: up to the scenario's own, and on as far as step times are known."""
        own, sizes = self.most_drafted, self.batches.tolist()
        known = (k for k in range(own + 1, MOST_COMPARED + 1) if any(self.cost.covers(k, batch) for batch in sizes))
        return [*range(own + 1), *known] if self.acceptance else [0]

    @property
    def learning(self) -> float:
        """Seconds of a step beside generation."""
        return sum(self.learner_seconds.values()) + self.drafter_seconds + self.sync_seconds

    def k_at(self, batch: int) -> int:
        """Draft length of a step of so many requests."""
        return self.k if isinstance(self.k, int) else self.k[batch]

    def length(self, k: int) -> float:
        """Acceptance length of k draft tokens."""
        return self.acceptance.length(k) if self.acceptance and k else 1.0

    def step(self, k: int, batch: Array) -> Array:
        """[n] seconds of a decode step of requests with mean context."""
        return self.cost.base(k, batch) + self.cost.slope(k) * batch * self.mean_context

    def adaptive(self, most: int) -> "Scenario":
        """With the draft length up to `most` that gives the most tokens a second at each batch size, the least among equals.

        The rule is that of `cotrain.rollout.speculation.controller`.
        """
        batch = np.arange(1, self.engines.max_num_seqs + 1, dtype=float)
        speeds = [self.length(k) / self.step(k, batch) for k in range(most + 1 if self.acceptance else 1)]
        return replace(self, k=[0, *np.argmax(speeds, axis=0).tolist()])

    def longer(self, tokens: float, k: int | None = None) -> "Scenario":
        """With an acceptance length of k draft tokens that is longer by so many, and the same draft lengths."""
        return replace(self, acceptance=self.acceptance and self.acceptance.longer(tokens, k))

    def without_speculation(self) -> "Scenario":
        return replace(self, k=0, acceptance=None, drafter_seconds=0.0)

    def scheduled(self, generation: Array, lag: int | None = None) -> Schedule:
        """Steps whose engines take so many seconds each; lag: instead of the scenario's."""
        learning, lag = np.full(len(generation), self.learning - self.sync_seconds), self.lag if lag is None else lag
        return schedule(generation + self.generation_overhead, learning, lag, self.sync_seconds)


class Estimate(NamedTuple):
    """A value with the ends of its 80 % interval."""

    value: float
    low: float
    high: float


class Arm(NamedTuple):
    generation: Generation
    schedule: Schedule


class Answer(NamedTuple):
    plain: Arm
    arm: Arm
    generation_speedup: Estimate
    step_speedup: Estimate


def answer(scenario: Scenario, seeds: int = 1) -> Answer:
    """Simulate the arm and its twin without speculation, means over seeds, with intervals by draws of what is uncertain."""
    arms = (scenario.without_speculation(), scenario)
    runs = [simulate(arm, seeds) for arm in arms]
    plain, speculating = (run.seconds for run in runs)
    varied, gains = _draws(scenario)
    times = [arm.scheduled(run.seconds * varied) for arm, run in zip(arms, runs, strict=True)]
    before, after = (time.step_seconds for time in times)
    steps = [before / scenario.scheduled(speculating * varied / gain).step_seconds for gain in gains]
    without, with_ = map(Arm, runs, times)
    generation = plain / speculating
    ends = np.quantile(np.stack([generation * gains, np.array(steps)]), (0.1, 0.9), axis=1).T.tolist()
    return Answer(without, with_, Estimate(generation, *ends[0]), Estimate(before / after, *ends[1]))


def simulate(scenario: Scenario, seeds: int = 1) -> Generation:
    """A step's generation by the event loop: means over steps and seeds, and the timeline of the first."""
    runs = [
        generate(s.cost, s.flat.tolist(), s.prompt_tokens, s.engines, s.k, s.acceptance, seed, s.order, s.samples)
        for seed in range(seeds)
        for s in scenario.each
    ]
    names = [f.name for f in fields(Generation) if f.name != "timeline"]
    return replace(runs[0], **{name: np.mean([getattr(run, name) for run in runs], axis=0) for name in names})


def generation_seconds(scenario: Scenario) -> float:
    """Seconds of generation without drawing, as a mean over the scenario's steps."""
    return fmean(map(_step_seconds, scenario.each))


def _step_seconds(s: Scenario) -> float:
    """Until the last engine has ended, when each step advances all its requests by the acceptance length: by that at their depth
    where they begin together, and by the mean where some wait for a slot or for room.

    Without drafts it is exact. With them `simulate` tends to it for long responses, and takes longer on average, since last
    steps are not used to the full.
    """
    shares, room, slots = s.shares, s.engines.kv_tokens or np.inf, s.engines.max_num_seqs
    prices = Prices.of(s.cost, s.k, min(slots, max(map(len, shares))), s.acceptance)
    starts, emitted = [0.0], {k: [s.length(k)] for k in (0, *prices.survival)}
    if all(len(share) <= slots and (share + s.prompt_tokens).sum() <= room for share in shares):
        for k, (depths, survival) in prices.survival.items():
            starts, emitted[k] = depths.tolist(), (1 + survival.sum(1)).tolist()
        emitted[0] = [1.0] * len(starts)
    return max(_engine_seconds(share.tolist(), s, room, prices, starts, emitted) for share in shares)


def _engine_seconds(
    requests: list[int], s: Scenario, room: float, prices: Prices, starts: list[float], emitted: dict[int, list[float]]
) -> float:
    """starts, emitted: first tokens of the depths, and by k the tokens that a step emits for a request at each of them."""
    waiting, running = requests[::-1], list[tuple[float, int]]()
    by_k, base, slope = prices.k.tolist(), prices.base.tolist(), prices.slope.tolist()
    clock = progress = context = held = 0.0
    prefill, depth, ends = cache(s.cost.prefill), 0, [*starts[1:], np.inf]
    while waiting or running:
        begun = 0
        while waiting and len(running) < len(base) - 1 and held + waiting[-1] + s.prompt_tokens <= room:
            heapq.heappush(running, (progress + waiting[-1], waiting[-1]))
            held += waiting.pop() + s.prompt_tokens
            begun += s.prompt_tokens
        clock, context, batch = clock + prefill(begun), context + begun, len(running)
        end = min(running[0][0], ends[depth])
        tokens, step = end - progress, emitted[by_k[batch]][depth]
        clock += tokens / step * (base[batch] + slope[batch] * (context + batch * (tokens - step) / 2))
        context, progress, depth = context + batch * tokens, end, depth + (end == ends[depth])
        while running and running[0][0] <= progress:
            _, length = heapq.heappop(running)
            context -= length + s.prompt_tokens
            held -= length + s.prompt_tokens
    return clock


def _draws(s: Scenario) -> tuple[Array, Array]:
    """[DRAWS] generation times of other prompts, and [DRAWS] speed-ups of them at other prices and acceptance lengths, both
    over their mean. Steps with drafts take longer by the error of both: speed goes with acceptance length over step time."""
    prompts, error = -(-len(s.lengths) // s.steps), float(np.hypot(s.step_time_error, s.acceptance_error))
    draws = [np.random.default_rng(i).integers(len(s.lengths), size=prompts) for i in range(DRAWS)]
    levels = [NormalDist().inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)]
    costs = [Paced(s.cost, pace) for pace in np.exp(-error * np.random.default_rng(0).permutation(levels)).tolist()]
    lengths = [[s.lengths[j] for j in chosen] for chosen in draws]
    drawn = [replace(s, lengths=drawn, steps=1, cost=cost) for drawn, cost in zip(lengths, costs, strict=True)]
    seconds = [[generation_seconds(each.without_speculation()), generation_seconds(each)] for each in drawn]
    plain, speculating = np.array(seconds).T
    gains = plain / speculating
    return plain / plain.mean(), gains / gains.mean()
