"""What is a draft length for each request worth, beside one for each batch size?

    python -m benchmarks.request_lengths

Requests whose matches are of classes with an acceptance of their own, on the two machines that tests/cotrain/engine draws
from: two CPU cores and a memory-bound GPU. A step takes what its verified tokens take, as with drafts that are looked up. All
acceptances and step times are known, so that the table is exact: tokens a second against no speculation, by the best length of
the batch; by class, with time at the price of what it yields without speculation (the rule of cotrain/engine) or of what it yields
with it (Dinkelbach 1967), or without drafts if that is faster; and by the best of all lengths of the classes.

The second table asks what expected response lengths would add: a batch of 32 requests of log-normal lengths (median 100, at most
800 tokens) drains, and those that are expected to run longer draft more. A step less of a request saves what a step of as many
requests as are left by then takes above one of a request fewer, and the draft length that is worth the most by that, or the one
of the batch, counts. Errors of the expected log lengths have a standard deviation of 0, 0.3 or 0.6. Mean over batches and standard
error of time by batch over time by expected length. Prints Markdown tables.
"""

import argparse
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from tests.cotrain.engine.simulated_engine import BAD, CPU, GOOD, GPU, K, Shape

MIXTURES = {
    "alike": ((1.0, (0.45, 0.55, 0.6)),),
    "a third repeats": ((0.3, (0.85, 0.9, 0.9)), (0.7, (0.2, 0.3, 0.3))),
    "a tenth repeats": ((0.1, (0.9, 0.9, 0.9)), (0.9, (0.1, 0.2, 0.2))),
    "four classes": ((0.2, (0.1, 0.2, 0.2)), (0.4, (0.3, 0.4, 0.4)), (0.3, (0.5, 0.6, 0.6)), (0.1, (0.9, 0.9, 0.9))),
}
"""(share of the requests, conditional acceptance by position) of each class."""

Array = NDArray[np.float64]
ERRORS, BATCHES, REQUESTS = (0, 0.3, 0.6), 20, 32

Classes = Sequence[tuple[float, Sequence[float]]]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| machine | requests | batch | by batch | by class | by class, sharper price | best |")
    print("|---|---|---|---|---|---|---|")
    for machine, shape in {"CPU": CPU, "GPU": GPU}.items():
        for name, classes in MIXTURES.items():
            for batch in (1, 4, 16, 32):
                cells = " | ".join(f"{speed:.3f}" for speed in speeds(shape, classes, batch))
                print(f"| {machine} | {name} | {batch} | {cells} |")
    print("\n| machine | acceptance | " + " | ".join(f"error {error}" for error in ERRORS) + " |")
    print("|---|---|" + "---|" * len(ERRORS))
    for (machine, shape), (name, rates) in product(
        {"CPU": CPU, "GPU": GPU}.items(), {"good": GOOD, "bad": BAD}.items()
    ):
        print(f"| {machine} | {name} | {' | '.join(gain_by_length(shape, rates, error) for error in ERRORS)} |")


def speeds(shape: Shape, classes: Classes, batch: int) -> list[float]:
    """Decoding speeds of the four rules, in the order of the table."""
    same = max(speed(shape, classes, batch, [k] * len(classes)) for k in range(K + 1))
    plain = max(1.0, speed(shape, classes, batch, by_price(shape, classes, batch, 1.0)))
    rate = 1.0
    for _ in range(10):  # reports
        rate = max(1.0, speed(shape, classes, batch, by_price(shape, classes, batch, rate)))
    lengths = product(range(K + 1), repeat=len(classes))
    return [same, plain, rate, max(speed(shape, classes, batch, chosen) for chosen in lengths)]


def by_price(shape: Shape, classes: Classes, batch: int, rate: float) -> list[int]:
    """Draft length of each class."""
    without = shape.seconds(0, 0, batch)
    prices = [rate * shape.seconds(k, k, batch) / without for k in range(K + 1)]
    lengths = []
    for _, rates in classes:
        lengths.append(ServedAcceptance(K, np.cumprod(rates).tolist()).best(prices, K).length)
    return lengths


def speed(shape: Shape, classes: Classes, batch: int, lengths: Sequence[int]) -> float:
    """Against no speculation. At batch 1 a step has one class; above, each step has the shares of all."""
    shares = [share for share, _ in classes]
    tokens = np.dot(shares, [1 + np.cumprod(rates[:k]).sum() for (_, rates), k in zip(classes, lengths, strict=True)])
    without = shape.seconds(0, 0, batch)
    if batch == 1:
        return float(tokens * without / np.dot(shares, [shape.seconds(k, k, 1) for k in lengths]))
    verified = float(np.dot(shares, lengths))
    return float(tokens * without / shape.seconds(verified, verified, batch))


def gain_by_length(shape: Shape, rates: Sequence[float], error: float) -> str:
    """Time to drain a batch by batch size over that by expected lengths, mean ± standard error."""
    ratios = []
    for seed in range(BATCHES):
        random = np.random.default_rng(seed)
        lengths = np.minimum(random.lognormal(np.log(100), 0.9, REQUESTS), 800)
        expected = lengths * np.exp(error * random.standard_normal(REQUESTS))
        ratios.append(drain(shape, rates, lengths, None) / drain(shape, rates, lengths, expected))
    return f"{np.mean(ratios):.3f} ± {np.std(ratios, ddof=1) / np.sqrt(BATCHES):.3f}"


def drain(shape: Shape, rates: Sequence[float], lengths: Array, expected: Array | None) -> float:
    """Seconds until the last of the requests has ended, if each gets the tokens that its drafts are expected to yield."""
    done, seconds = np.zeros(len(lengths)), 0.0
    tokens = np.array([1.0, *(1.0 + np.cumsum(np.cumprod(rates)))])
    alone = [0.0] + [shape.seconds(0, 0, batch) for batch in range(1, len(lengths) + 1)]
    while len(on := np.flatnonzero(done < lengths)):
        costs = np.array([shape.seconds(k, k, len(on)) for k in range(K + 1)]) / alone[len(on)]
        drafted = np.full(len(on), int((tokens / costs).argmax()))
        if expected is not None:
            left = np.maximum(expected - done, 0.05 * expected)[on]
            rank = np.argsort(np.argsort(-left)) + 1
            saved = np.diff(alone)[rank - 1] / np.diff(alone)[: len(on)].mean()
            drafted = np.maximum(drafted, (saved[:, None] * tokens - costs).argmax(1))
        seconds += shape.seconds(float(drafted.mean()), float(drafted.mean()), len(on))
        done[on] += tokens[drafted]
    return seconds


if __name__ == "__main__":
    main()
