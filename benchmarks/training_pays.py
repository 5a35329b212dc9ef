"""A rule that says when a round of drafter training pays, against training always, never, and not speculating, in simulated runs.

    python -m benchmarks.training_pays [--worlds 400] [--seed 0] [--show 5]

A world is drawn at random: how long the run is, what a round, a swap and a draft cost, how well the drafter accepts at the start, how
well it could, how fast it learns, and how fast the moving policy leaves it behind. Seconds are those of a step's generation without
speculation. Every arm lives through the same world. Prints how much slower than the best of the other three the rule is, and the worlds
in which it does worst.
"""

import argparse
import math
import random
from dataclasses import dataclass
from statistics import fmean

from cotrain.publish.investment import Investment, Prices, Spent, swap_pays

K = 3  # draft tokens


@dataclass(frozen=True)
class World:
    """A run. Seconds are relative to a step's generation without speculation."""

    steps: int
    other: float  # seconds of a step besides generation
    draft_cost: float  # of a step of the engine with drafts, relative to one without
    start: float  # acceptance length at the start
    limit: float  # acceptance length after endless training
    half: float  # rounds to half of the way there
    drift: float  # share of the accepted draft tokens that a step of the policy takes away
    round_s: float
    swap_s: float

    @classmethod
    def drawn(cls, rng: random.Random, shortest: int = 50) -> "World":
        def log_uniform(low: float, high: float) -> float:
            return math.exp(rng.uniform(math.log(low), math.log(high)))

        other, limit = rng.uniform(0.1, 1.0), rng.uniform(1.2, 3.4)
        return cls(
            steps=int(log_uniform(shortest, 300)),
            other=other,
            draft_cost=rng.uniform(1.05, 1.6),
            start=1 + rng.random() * (limit - 1),
            limit=limit,
            half=log_uniform(1, 60),
            drift=rng.choice([0.0, log_uniform(0.001, 0.1)]),
            round_s=rng.uniform(0.006, 0.3) * (1 + other),
            swap_s=rng.uniform(0, 0.1),
        )

    def generation(self, length: float) -> float:
        """Seconds of a step's generation at an acceptance length, without drafts where they do not pay."""
        return min(1.0, self.draft_cost / length)


def seconds_of(world: World, arm: str, rng: random.Random) -> tuple[float, int]:
    """Return the seconds of a run, and the rounds that it trained. arm: none, frozen, always or rule."""
    if arm == "none":
        return world.steps * (1 + world.other), 0
    rule, total, rounds, trained, since = Investment(), 0.0, 0, False, 0
    served = candidate = world.start
    for left in reversed(range(world.steps)):
        step = world.generation(served) + world.other + trained * world.round_s
        total, since = total + step, since + 1
        # Rollouts differ from step to step, and both drafters meet the same ones.
        common, own = 1 + rng.gauss(0, 0.03), rng.gauss(0, 0.01)
        rule.observe(1 + (served - 1) * common, 1 + (candidate - 1) * common + own, float(trained))
        if candidate > served and swap_pays(
            world.generation(served) - world.generation(candidate), since, left, world.swap_s
        ):
            served, total, since = candidate, total + world.swap_s, 0
            rule.published()
        spent = Spent(trained * world.round_s, world.round_s, rounds, step, total)
        verdict = rule.decide(Prices(world.generation, world.swap_s, spent), left)
        trained = verdict.trains if arm == "rule" else arm == "always" and left > 0
        if trained:
            rounds += 1
            candidate += (1 - 0.5 ** (1 / world.half)) * (world.limit - candidate)
        served, candidate = (1 + (length - 1) * (1 - world.drift) for length in (served, candidate))
    return total, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=400, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--shortest", type=int, default=50, help="steps of a run at least (default %(default)s)")
    parser.add_argument("--show", type=int, default=5, help="worst worlds to print (default %(default)s)")
    args = parser.parse_args()
    rng, rows = random.Random(args.seed), []
    for number in range(args.worlds):
        world = World.drawn(rng, args.shortest)
        times = {arm: seconds_of(world, arm, random.Random(number))[0] for arm in ("always", "frozen", "none")}
        seconds, rounds = seconds_of(world, "rule", random.Random(number))
        best = min(times, key=lambda arm: times[arm])
        rows.append(
            (seconds / times[best] - 1, best, rounds, world, {a: t / times[best] - 1 for a, t in times.items()})
        )
    rows.sort(key=lambda row: -row[0])
    print("seconds more than the best of always, frozen and none:")
    print("| arm | mean | worst | more than 2 % |\n|---|--:|--:|--:|")
    arms = {"rule": [row[0] for row in rows]} | {arm: [row[4][arm] for row in rows] for arm in rows[0][4]}
    for arm, more in arms.items():
        print(f"| {arm} | {fmean(more):+.1%} | {max(more):+.1%} | {fmean(m > 0.02 for m in more):.1%} |")
    for more, best, rounds, world, _ in rows[: args.show]:
        print(f"{more:+.1%} over {best}, {rounds} rounds: {world}")


if __name__ == "__main__":
    main()
