"""How often a healthy drafter is stopped or rolled back, and how soon a better one is published, in thousands of simulated steps.

    python -m benchmarks.gate_decisions --simulate [--steps 10000] [--only NAME...]

The publisher and its decisions are the real ones, and so are the ledger of a run with lag and the scores' arithmetic. Trainer, engines
and rollouts are those of tests/cotrain/publish: a drafter is a skill, and how well tokens can be drafted varies by prompt, rollout and
token. The drafter is always served as it was scored, so every stop and every roll-back is a false one. After REST judged candidates
that are no better than the served drafter, the policy moves: the served drafter loses MOVE of its skill, and candidates do not.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cotrain.config.schema import DrafterConfig
from cotrain.loop.ledger import Ledger
from cotrain.publish.publisher import Publisher, PublisherSpec
from cotrain.records import RolloutBatch, Versions
from cotrain.weights.versions import CurrentWeights
from tests.cotrain.publish.simulated import Lengths, rollouts_of, true_length
from tests.cotrain.publish.simulated_run import GOOD, World

REST, MOVE = 20, 0.5
SOON = 20
"""Judged candidates within which a better drafter is to be published."""

TOKEN_SECONDS, USUAL_TOKENS, MOST_TOKENS = 0.05, 16, 128


@dataclass(frozen=True)
class Case:
    """Steps of one kind."""

    name: str
    prompts: int
    samples: int
    lengths: Lengths
    lag: int = 0


def geometric(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    return np.minimum(rng.geometric(1 / USUAL_TOKENS, number), MOST_TOKENS) - 1


def one_to_three(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    return rng.integers(0, 3, number)


def mostly_one(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    return np.where(rng.random(number) < 0.6, 0, geometric(rng, number) + 1)


def log_normal(sd: float) -> Lengths:
    def lengths(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
        drawn = USUAL_TOKENS * np.exp(sd * rng.standard_normal(number))
        return drawn.astype(np.int64).clip(1, MOST_TOKENS) - 1

    return lengths


CASES = [
    Case("4 x 4", 4, 4, geometric),
    Case("4 x 8", 4, 8, geometric),
    Case("4 x 4, 1 to 3 tokens", 4, 4, one_to_three),
    Case("4 x 4, 60 % of one token", 4, 4, mostly_one),
    *(
        Case(f"{prompts} x 4, lag {lag}, sd {sd}", prompts, 4, log_normal(sd), lag)
        for prompts, lag, sd in [
            (8, 1, 0.4),
            (8, 1, 1.2),
            (8, 2, 0.8),
            (8, 3, 0.8),
            (8, 4, 0.4),
            (8, 4, 1.2),
            (4, 4, 1.2),
        ]
    ),
]


@dataclass
class Tally:
    """What became of a case."""

    stops: Counter[str] = field(default_factory=Counter)
    rolled_back: int = 0
    judged: int = 0
    published: int = 0
    waited: list[int] = field(default_factory=list)
    """Judged candidates until each better drafter was published."""

    @property
    def is_good(self) -> bool:
        return not self.stops and not self.rolled_back and bool(self.waited) and max(self.waited) <= SOON


def simulate(case: Case, num_steps: int, seed: int = 0) -> Tally:
    """Run the publisher through these steps. A stop is counted, and the run goes on."""
    torch.set_num_threads(1)
    world = World(GOOD, 0.0, seed, case.prompts, case.samples, case.lengths)
    drafter = DrafterConfig.model_validate({"model": {"type": "eagle3"}})
    world.current = CurrentWeights(Versions(0, 0), case.lag)
    publisher = Publisher(PublisherSpec(drafter, num_steps), world, world, Path(), world.current)
    tally, since, better = Tally(), 0, False
    steps = with_lag(case, world, num_steps) if case.lag else in_turns(world, num_steps)
    for step, batch in enumerate(steps, 1):
        world.current.record_policy(None, step - 1)
        outcome = publisher.evaluate(step, batch)
        kinds = Counter(event.kind for event in outcome.events)
        tally.rolled_back += kinds["rolled back"]
        if outcome.failure is not None:
            tally.stops[outcome.failure.names] += 1
            publisher.serving = replace(publisher.serving, unjudged=0)
        elif outcome.trains:
            world.train(step, 1)
        judged = kinds["published"] + kinds["kept back"] + kinds["refused"]
        tally.judged, tally.published, since = (
            tally.judged + judged,
            tally.published + kinds["published"],
            since + judged,
        )
        if better and kinds["published"]:
            tally.waited.append(since)
            since, better = 0, False
        elif not better and since >= REST:
            since, better = 0, True
            world.published = {v: (skill - MOVE, updates) for v, (skill, updates) in world.published.items()}
    return tally


def in_turns(world: World, num_steps: int) -> Iterator[RolloutBatch]:
    """Steps without lag."""
    for step in range(1, num_steps + 1):
        yield world.generate(step)


def with_lag(case: Case, world: World, num_steps: int) -> Iterator[RolloutBatch]:
    """Steps of a run with lag: a group begins when it is admitted and ends with its longest response.

    A swap begins a new segment of each running response, and a step's window has the groups that have ended since the last.
    """
    rng = np.random.default_rng([world.seed, 7])
    ledger, now = Ledger(case.prompts, case.lag, num_steps), 0.0
    swaps = [(0.0, Versions(0, 0))]
    groups: dict[int, tuple[float, NDArray[np.int64]]] = {}  # when it began, and its tokens behind the first
    update = TOKEN_SECONDS * USUAL_TOKENS
    for step in range(1, num_steps + 1):
        for group in ledger.admit():
            groups[group.number] = now, case.lengths(rng, case.samples)
        ends = {number: began + TOKEN_SECONDS * (1 + tokens.max()) for number, (began, tokens) in groups.items()}
        now = max([now, *(ends.get(number, now) for number in range((step - 1) * case.prompts, step * case.prompts))])
        ended = {number: groups.pop(number) for number in ends if ends[number] <= now}
        for number in ended:
            for state in ("dispatched", "finished", "scored"):
                ledger.move(number, state)
        assert ledger.take() is not None
        policy = step - 1
        yield window(world, step, rng, ended, swaps)
        if world.serving != swaps[-1][1].drafter:
            swaps.append((now, Versions(policy, world.serving)))
        now += update * rng.uniform(0.5, 1.5)
        swaps.append((now, Versions(step, world.serving)))
        swaps = swaps[-4 * (case.lag + 2) :]
        ledger.release()


def window(
    world: World,
    step: int,
    rng: np.random.Generator,
    ended: dict[int, tuple[float, NDArray[np.int64]]],
    swaps: list[tuple[float, Versions]],
) -> RolloutBatch:
    """The last segments of the responses of these groups."""
    prompts, lengths, versions = list[int](), list[int](), list[Versions]()
    for number, (began, tokens) in ended.items():
        for length in tokens.tolist():
            end = began + TOKEN_SECONDS * (1 + length)
            swapped, of = max((swap for swap in swaps if swap[0] <= end), key=lambda swap: swap[0])
            before = max(0, int((swapped - began) / TOKEN_SECONDS))
            prompts.append(number)
            lengths.append(max(0, length - before))
            versions.append(of)
    rollouts = rollouts_of(rng, np.array(prompts, np.int64), np.array(lengths, np.int64))
    return world.serve(step, rollouts, versions)


def run(names: list[str] | None, num_steps: int) -> int:
    """Print a Markdown table of the cases, and return 1 if one of them is not as it should be."""
    gain = true_length(GOOD) - true_length(GOOD - MOVE)
    print(f"{num_steps} steps each; a better drafter's acceptance length is {gain:.2f} above that of the served one\n")
    print(
        "| steps | stops | roll-backs | candidates judged | published | better ones | judged until published, mean, most |"
    )
    print("|---|---|---|---|---|---|---|")
    status = 0
    for case in (case for case in CASES if names is None or case.name in names):
        found = simulate(case, num_steps)
        stops = ", ".join(f"{number} {name}" for name, number in found.stops.items()) or "0"
        waited = f"{np.mean(found.waited):.1f}, {max(found.waited)}" if found.waited else "-"
        row = [case.name, stops, found.rolled_back, found.judged, found.published, len(found.waited), waited]
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        status |= not found.is_good
    return status
