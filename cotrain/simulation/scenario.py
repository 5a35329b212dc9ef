"""Simulate a training step of a system with speculation and the same step without it, and compare the two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, zip_longest
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.step_time import Array, StepTime

Ints = NDArray[np.int64]
DraftLengths = int | Sequence[int]
"""Draft tokens per request and step: one number, or one for each batch size, where entry 0 is not used."""

DRAWS = 32
"""Number of draws behind an interval. They spread evenly over the errors, so that more draws would hardly move its ends."""

MOST_COMPARED = 7
"""Longest draft length that is compared with a scenario's own, unless that is longer."""

REPEATS, FEW_TOKENS = 16, 100_000
"""A scenario of at most FEW_TOKENS response tokens is simulated REPEATS times, to average over chance."""

WARM_UP = 3
"""Passes through a series of steps before the one that counts, so that the start of the run has no effect."""


TOO_HIGH = 1.3, 3.0
"""Envelopes of systems that were measured afterwards over what was measured, see docs/simulator.md: for the interval of another."""


@dataclass(frozen=True)
class Engines:
    count: int
    max_num_seqs: int
    kv_tokens: int | None = None
    """Most tokens of context in an engine. A request begins only when its context at full length fits."""


class Schedule(NamedTuple):
    step_seconds: float
    exposed_generation: float
    """Seconds per step that the learner waits for responses."""


@dataclass(frozen=True)
class Scenario:
    cost: StepTime
    engines: Engines
    lengths: list[list[int]]
    """Response tokens of each prompt's samples, step after step, in the order in which prompts begin."""
    prompt_tokens: float
    acceptance: Acceptance | None
    k: DraftLengths
    steps: int = 1
    """Number of steps in `lengths`. Each is simulated, and answers are means over them."""
    step_time_error: float = 0.0
    """Relative standard error of the time of a step with drafts over that of a step without."""
    acceptance_error: float = 0.0
    """Relative standard error of the acceptance length."""
    draft_pace: float | Array = 1.0
    """Factor on the time of engine steps with drafts by `cost`; [steps] if each training step has its own."""
    learner_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage of a step except generation."""
    generation_overhead: float = 0.0
    """Seconds of a step's generation during which no engine works."""
    lag: int = 0
    """Steps that generation may run ahead of the learner; 0 is synchronous."""
    drafter_seconds: float = 0.0
    """Drafter training that a step waits for."""
    drafted_k: tuple[int, ...] = ()
    """Draft lengths of the measured steps that a roofline was adjusted to."""

    @property
    def speculates(self) -> bool:
        """Does it draft, at least at batch sizes where that pays?"""
        return self.acceptance is not None and self.k != 0

    @property
    def envelope(self) -> bool:
        """Do times of drafted steps come from a roofline that was not adjusted to measured steps with drafts this long?"""
        known = max((0, *self.drafted_k))
        return self.cost.origin == "roofline" and self.speculates and max(self.most_drafted, 1) > known

    @cached_property
    def flat(self) -> Ints:
        return np.concatenate([np.asarray(group, np.int64) for group in self.lengths])

    @cached_property
    def requests(self) -> Ints:
        """[steps times engines, most responses of an engine] response tokens in the order in which they begin, then zeros.

        Prompts go to the engines in turn, with all their samples.
        """
        count, shares = len(self.lengths), list[list[int]]()
        for step in range(self.steps):
            groups = self.lengths[step * count // self.steps : (step + 1) * count // self.steps]
            shares += ([*chain(*groups[engine :: self.engines.count])] for engine in range(self.engines.count))
        return np.array([*zip_longest(*shares, fillvalue=0)], np.int64).T

    @property
    def batches(self) -> Ints:
        """Batch sizes that an engine goes through."""
        return np.arange(min(self.engines.max_num_seqs, self.requests.shape[1])) + 1

    @property
    def prices(self) -> tuple[Ints, Array, Array]:
        """Draft length, seconds of a step, seconds per token of context: each [batch sizes from 0 on]; a batch of 0 is free."""
        sizes = np.append(0, self.batches)
        k = [self.k_at(max(size, 1)) for size in sizes.tolist()]
        base = {n: self.cost.base(n, np.maximum(sizes, 1.0)) for n in set(k)}
        return (
            np.array(k),
            np.array([base[n][size] for size, n in enumerate(k)]) * (sizes > 0),
            np.array([self.cost.slope(n) for n in k]),
        )

    @cached_property
    def mean_context(self) -> float:
        """Tokens of context of a running request, mean over all tokens generated."""
        return self.prompt_tokens + float((self.flat.astype(float) ** 2).sum() / self.flat.sum()) / 2

    @property
    def most_drafted(self) -> int:
        return self.k if isinstance(self.k, int) else max(self.k)

    @property
    def draft_lengths(self) -> list[int]:
        """Draft lengths to compare: up to the scenario's own, and on to MOST_COMPARED where step times are known."""
        own, sizes = self.most_drafted, self.batches.tolist()
        known = (k for k in range(own + 1, MOST_COMPARED + 1) if any(self.cost.covers(k, batch) for batch in sizes))
        return [*range(own + 1), *known] if self.acceptance else [0]

    @property
    def learning(self) -> float:
        """Seconds of a step besides generation."""
        return sum(self.learner_seconds.values()) + self.drafter_seconds

    def k_at(self, batch: int) -> int:
        """Draft length of an engine step with this many requests."""
        return self.k if isinstance(self.k, int) else self.k[batch]

    def length(self, k: int) -> float:
        """Acceptance length of k draft tokens."""
        return self.acceptance.length(k) if self.acceptance and k else 1.0

    def step(self, k: int, batch: Array) -> Array:
        """[n] seconds of a decode step of requests with mean context."""
        return self.cost.base(k, batch) + self.cost.slope(k) * batch * self.mean_context

    def adaptive(self, most: int) -> "Scenario":
        """Copy with the draft length up to `most` that gives the most tokens per second at each batch size, the least of equals.

        The rule is that of `cotrain.rollout.speculation.controller`.
        """
        batch = np.arange(1, self.engines.max_num_seqs + 1, dtype=float)
        speeds = [self.length(k) / self.step(k, batch) for k in range(most + 1 if self.acceptance else 1)]
        return replace(self, k=[0, *np.argmax(speeds, axis=0).tolist()])

    def longer(self, times: float) -> "Scenario":
        """Copy with an acceptance length `times` as long, within 1 to the draft length + 1, and the same draft lengths.

        It makes steps with drafts faster instead of fewer, which takes the same time.
        """
        length, most = self.length(self.most_drafted), self.most_drafted + 1
        return replace(self, draft_pace=self.draft_pace * length / min(max(times * length, 1.0), most))

    def without_speculation(self) -> "Scenario":
        return replace(self, k=0, acceptance=None, drafter_seconds=0.0)

    def scheduled(self, generation: Array | float) -> Schedule:
        """Schedule steps whose engines take this many seconds, the same in each or [n] one for each."""
        seconds = np.atleast_1d(generation) + self.generation_overhead
        return schedule(seconds, np.full(len(seconds), self.learning), self.lag)


def schedule(generation: Array, learning: Array, lag: int) -> Schedule:
    """Mean times of a run that repeats these steps endlessly.

    generation, learning: [n] seconds of each step; learning includes sending the weights. Step i begins to generate once step
    i - 1 is generated and the weights of step i - 1 - lag have arrived. The learner takes it once it is generated and step i - 1
    is learnt from. Lag 0 is the synchronous case.
    """
    count = len(generation)
    before = count * max(WARM_UP, -(-(lag + 1) // count))
    generated, exposed = 0.0, 0.0
    arrived = [0.0] * (lag + 1)
    for i in range(before + count):
        generated = max(generated, arrived[i]) + float(generation[i % count])
        wait = max(0.0, generated - arrived[-1])
        exposed += wait if i >= before else 0.0
        arrived.append(arrived[-1] + wait + float(learning[i % count]))
    return Schedule((arrived[-1] - arrived[-1 - count]) / count, exposed / count)


class Generation(NamedTuple):
    """What it takes to generate the responses of a step. Counts are sums over engines, and means over steps."""

    seconds: float
    """Until the last engine has ended."""
    mean_batch: float
    """Requests that an engine runs at once while it has any."""
    busy: float
    """Share of the time in which an engine has work, mean over engines."""
    drafted: float
    accepted: float
    """Includes draft tokens past the end of a response, which are verified and then dropped."""
    acceptance_length: float
    """Tokens that a verification step emits on average; 1 if there were none."""
    step_seconds: Array
    """[steps]"""
    timeline: tuple[Array, Array]
    """[spans, engines] each, of the first step: seconds at which spans end, and requests that run until then."""


def generate(s: Scenario) -> Generation:
    """Simulate each step, from the end of one response to the next. In between, an engine step advances every running request by
    the mean number of tokens emitted at its depth; by chance, a response takes more steps or fewer.

    A freed slot takes the next request, whose prompt is computed first; a request that is too long for any engine is left out.
    Without drafts nothing is approximate.
    """
    repeats, (k, base, slope) = REPEATS if s.flat.sum() <= FEW_TOKENS else 1, s.prices
    starts, emitted, spread, beyond = (s.acceptance or Acceptance([0.0])).progress(s.most_drafted)
    queued = np.tile(np.pad(s.requests, ((0, 0), (0, 1))), (repeats, 1))  # one row per engine, ended by a zero
    levels = np.tile(_normal(repeats), (queued.size // repeats, 1)).T
    luck = np.random.default_rng(0).permuted(levels, axis=0).reshape(queued.shape) * np.sqrt(queued)
    room, prefill = s.engines.kv_tokens or np.inf, cache(lambda prompts: s.cost.prefill(prompts * s.prompt_tokens))
    pace = np.tile(np.repeat(np.broadcast_to(s.draft_pace, s.steps), s.engines.count), repeats)
    clock, begun, spans = np.zeros(len(queued)), np.zeros(len(queued), int), list[tuple[Array, ...]]()
    lengths, done, chance = np.zeros((3, len(queued), len(k) - 1))  # per slot; a slot without a request has length 0
    while True:
        if queued[np.arange(len(queued)), begun].any():
            place = np.minimum(begun[:, None] + (lengths == 0).cumsum(1) - 1, queued.shape[1] - 1)
            new = np.where(lengths == 0, np.take_along_axis(queued, place, 1), 0)
            held = (lengths + new + s.prompt_tokens) * (lengths + new > 0)
            taken = (held * (new == 0)).sum(1, keepdims=True) + (held * (new > 0)).cumsum(1)
            new = new * (taken <= room)
            chance = np.where(new > 0, np.take_along_axis(luck, place, 1), chance)
            lengths, done, admitted = lengths + new, np.where(new > 0, 0.0, done), (new > 0).sum(1)
            clock, begun = clock + [prefill(prompts) for prompts in admitted.tolist()], begun + admitted
        running = lengths > 0
        batch = running.sum(1)
        if not batch.any():
            break
        at = k[batch][:, None], np.searchsorted(starts, done, side="right") - 1
        ends = lengths + beyond[at] + np.sqrt(spread[at]) * chance
        stops = np.minimum(ends, np.append(starts[1:], np.inf)[at[1]])
        needed = np.where(running, np.maximum(stops - done, 0.0) / emitted[at], np.inf)
        steps = np.where(batch > 0, needed.min(1), 0.0)
        advance = np.where(running, emitted[at] * steps[:, None], 0.0)
        read = steps * (running * (s.prompt_tokens + done)).sum(1) + advance.sum(1) * (steps - 1) / 2
        clock = clock + (steps * base[batch] + read * slope[batch]) * np.where(k[batch] > 0, pace, 1.0)
        done = np.where(needed <= steps[:, None], stops, done + advance)
        lengths = np.where(done < ends, lengths, 0)
        spans.append((clock, batch, k[batch], batch * steps, advance.sum(1)))
    return _summary(s, *np.array(spans).swapaxes(0, 1))


def _summary(s: Scenario, clock: Array, batch: Array, k: Array, verified: Array, emitted: Array) -> Generation:
    """Summarise spans, [spans, repeats times steps times engines] each; verified and emitted are sums over requests."""
    seconds = clock[-1].reshape(-1, s.steps, s.engines.count)
    share = (k > 0) * s.engines.count / clock.shape[1]
    drafted, accepted, drafts = ((x * share).sum() for x in (k * verified, emitted - verified, verified))
    return Generation(
        seconds=float(seconds.max(2).mean()),
        mean_batch=float((np.diff(clock, axis=0, prepend=0.0) * batch).sum() / seconds.sum()),
        busy=float((seconds.mean(2) / seconds.max(2)).mean()),
        drafted=float(drafted),
        accepted=float(accepted),
        acceptance_length=float(1.0 + accepted / max(drafts, 1.0)),
        step_seconds=seconds.max(2).mean(0),
        timeline=(clock[:, : s.engines.count], batch[:, : s.engines.count]),
    )


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


def answer(scenario: Scenario) -> Answer:
    """Simulate the scenario with and without speculation. Intervals come from draws of what is uncertain.

    A speed-up of an envelope is too high, so that its interval lies below it.
    """
    arms = (scenario.without_speculation(), scenario)
    runs = [generate(arm) for arm in arms]
    plain, speculating = (run.seconds for run in runs)
    varied, gains = _draws(scenario)
    if scenario.envelope:
        gains = gains / np.random.default_rng(1).permutation(np.geomspace(*TOO_HIGH, DRAWS))
    times = [arm.scheduled(run.seconds * varied) for arm, run in zip(arms, runs, strict=True)]
    before, after = (time.step_seconds for time in times)
    steps = [before / scenario.scheduled(speculating * varied / gain).step_seconds for gain in gains]
    without, with_ = map(Arm, runs, times)
    generation = plain / speculating
    ends = np.quantile(np.stack([generation * gains, np.array(steps)]), (0.1, 0.9), axis=1).T.tolist()
    return Answer(without, with_, Estimate(generation, *ends[0]), Estimate(before / after, *ends[1]))


def _draws(s: Scenario) -> tuple[Array, Array]:
    """[DRAWS] generation times of resampled prompts and [DRAWS] speed-ups with other step times and acceptance lengths, both over
    their mean. The pace of steps with drafts carries both errors, since speed goes with acceptance length over step time."""
    prompts, error = -(-len(s.lengths) // s.steps), float(np.hypot(s.step_time_error, s.acceptance_error))
    chosen = np.stack([np.random.default_rng(i).integers(len(s.lengths), size=prompts) for i in range(DRAWS)])
    paces = np.exp(-error * np.random.default_rng(0).permutation(_normal(DRAWS)))
    drawn = replace(s, lengths=[s.lengths[i] for i in chosen.flat], steps=DRAWS, draft_pace=paces)
    plain, speculating = (generate(arm).step_seconds for arm in (drawn.without_speculation(), drawn))
    gains = plain / speculating
    return plain / plain.mean(), gains / gains.mean()


def _normal(count: int) -> Array:
    """Evenly spread quantiles of the standard normal distribution."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
