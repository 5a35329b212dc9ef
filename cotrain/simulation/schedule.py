"""Seconds of a training step when generation may run ahead of the learner."""

from typing import NamedTuple

from cotrain.simulation.step_time import Array

WARM_UP = 3
"""Passes through the series before the one that counts, so that the start of the run does not."""


class Schedule(NamedTuple):
    step_seconds: float
    exposed_generation: float
    """Seconds a step in which the learner waits for responses."""


def schedule(generation: Array, learning: Array, lag: int, sync: float = 0.0) -> Schedule:
    """Means over a run that goes through these steps over and over.

    generation, learning: [n] seconds of each step; sync: of sending the weights. Step i generates once step i - 1 is
    generated and the weights of step i - 1 - lag have arrived; it is learnt from once it is generated and step i - 1 is learnt
    from. Lag 0 is the synchronous case. Raises ValueError for series of different lengths, empty ones and a negative lag.
    """
    if len(generation) != len(learning) or not len(generation) or lag < 0:
        raise ValueError(
            f"{len(generation)} generations, {len(learning)} learnings, lag {lag}: equally many, lag from 0"
        )
    count = len(generation)
    before = count * max(WARM_UP, -(-(lag + 1) // count))
    generated, exposed = 0.0, 0.0
    arrived = [0.0] * (lag + 1)
    for i in range(before + count):
        generated = max(generated, arrived[i]) + float(generation[i % count])
        wait = max(0.0, generated - arrived[-1])
        exposed += wait if i >= before else 0.0
        arrived.append(arrived[-1] + wait + float(learning[i % count]) + sync)
    return Schedule((arrived[-1] - arrived[-1 - count]) / count, exposed / count)
