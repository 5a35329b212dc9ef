"""Generation time without drawing anything: the sum over the batch sizes of batches that drain."""

from collections.abc import Sequence

import numpy as np

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.rollout import DraftLengths, Ints, Order, Prices, deal, requests_of
from cotrain.simulation.step_time import StepTime


def closed_form(
    cost: StepTime,
    lengths: Sequence[int],
    prompt_tokens: Sequence[int] | int,
    engines: int,
    k: DraftLengths,
    acceptance: Acceptance | None,
    order: Order = "drawn",
    samples: int = 1,
) -> float:
    """Seconds until the last engine has ended when nothing queues, and requests are dealt out as in `generate`.

    Between two ends the batch is constant, and each step advances its requests by the acceptance length. Exact for k = 0.
    `generate` tends to it for long responses, and takes longer on average, since last steps are not used to the full.
    """
    requests, prompts = requests_of(lengths, prompt_tokens)
    shares = deal(requests, engines, samples, order)
    prices = Prices.of(cost, k, max(map(len, shares)), acceptance)
    return max(
        float(cost.prefill(float(prompts[share].sum()))) + _draining(prices, requests[share], prompts[share])
        for share in shares
        if len(share)
    )


def _draining(prices: Prices, lengths: Ints, prompts: Ints) -> float:
    """Seconds of decoding of requests that start together."""
    order = np.argsort(lengths, kind="stable")
    ends = lengths[order].astype(float)
    starts = next(iter(prices.survival.values()))[0] if prices.survival else np.zeros(1)
    cuts = np.unique(np.concatenate([[0.0], ends, starts[starts < ends[-1]]]))
    low, high = cuts[:-1], cuts[1:]
    ended = np.searchsorted(ends, low, side="right")
    batch = len(ends) - ended
    context = np.append(np.cumsum(prompts[order][::-1])[::-1], 0)[ended]
    emitted = np.ones(len(low))
    for k, (_, survival) in prices.survival.items():
        at = prices.k[batch] == k
        emitted[at] = 1 + survival.sum(1)[np.searchsorted(starts, low[at], side="right") - 1]
    middle = (low + high - emitted) / 2
    seconds = prices.base[batch] + prices.slope[batch] * (context + batch * middle)
    return float(((high - low) / emitted * seconds).sum())
