"""The core: how long engines take to generate responses, from the end of one response to the next."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import StepTimes
from cotrain.simulation.step_time import Array

Ints = NDArray[np.int64]


def generate(cost: StepTimes, acceptance: Acceptance, k: Sequence[int], queues: Ints, prompt_tokens: float) -> Array:
    """Return [engines] seconds until each engine has ended.

    k: draft tokens by batch size, from 0 to the number of slots. queues: [engines, responses] tokens of responses in the order
    in which they begin, then zeros.

    A step advances every running request by the mean number of tokens that are emitted at its depth. A freed slot takes the
    next request, whose prompt is computed first. Without drafts nothing is approximate.
    """
    sizes, drafted, queues = np.arange(1, len(k)).astype(float), np.array(k), np.pad(queues, ((0, 0), (0, 1)))
    bases = {n: np.append(0.0, cost.base(n, sizes)) for n in set(k)}
    base, slope = np.array([bases[n][size] for size, n in enumerate(k)]), np.array([cost.slope(n) for n in k])
    starts, emitted, beyond = acceptance.progress(max(k))
    bounds, prefill = np.append(starts[1:], np.inf), cache(lambda prompts: cost.prefill(prompts * prompt_tokens))
    clock, begun = np.zeros(len(queues)), np.zeros(len(queues), int)
    lengths, done = np.zeros((2, len(queues), len(sizes)))  # of each slot; a slot without a request has length 0
    while True:
        free = lengths == 0
        place = np.minimum(begun[:, None] + free.cumsum(1) - 1, queues.shape[1] - 1)
        new = np.where(free, np.take_along_axis(queues, place, 1), 0)
        lengths, done, admitted = lengths + new, np.where(new > 0, 0.0, done), (new > 0).sum(1)
        begun = begun + admitted
        running = lengths > 0
        batch = running.sum(1)
        if not batch.any():
            return clock
        at = drafted[batch][:, None], np.searchsorted(starts, done, side="right") - 1
        ends = lengths + beyond[at]
        stops = np.minimum(ends, bounds[at[1]])
        needed = np.where(running, np.maximum(stops - done, 0.0) / emitted[at], np.inf)
        steps = np.where(batch > 0, needed.min(1), 0.0)
        advance = np.where(running, emitted[at] * steps[:, None], 0.0)
        read = steps * (running * (prompt_tokens + done)).sum(1) + advance.sum(1) * (steps - 1) / 2
        clock = clock + steps * base[batch] + read * slope[batch] + [prefill(prompts) for prompts in admitted.tolist()]
        done = np.where(needed <= steps[:, None], stops, done + advance)
        lengths = np.where(done < ends, lengths, 0)
