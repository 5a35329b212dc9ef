"""The target's processed distribution at each emitted position, from a forward of the target over the emitted text.

Order of operations as in vLLM: temperature, top-k, top-p, softmax. Logits are processed in float32 (or wider) as the
engine does, so that both cut at the same token; probabilities are float64.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cotrain.lossless.draws import Draws, concatenate, draws_of
from drafters.base import Sampler
from drafters.losses import at_least_float32, truncate


def target_log_probs(logits: Tensor, sampler: Sampler) -> Tensor:
    """Float64 log-probabilities [T, V] of the processed distribution; -inf outside top-k and top-p.

    logits [T, V]: row t predicts emitted token t. At temperature 0 the argmax has probability 1, as in vLLM. What vLLM
    returns as processed log-probs is this at the emitted tokens.
    Raises ValueError naming the setting that is out of range, or when a logit is NaN.
    """
    _check(logits, sampler)
    return _log_probs(_scaled(logits, sampler.temperature), sampler)


def emitted_draws(
    logits: Tensor,
    tokens: Tensor,
    sampler: Sampler,
    orders: Mapping[str, Tensor] | None = None,
    logit_tolerance: float = 0.0,
    chunk_rows: int = 64,
) -> Draws:
    """Emitted tokens [T] under the target's law from logits [T, V]; orders with keys [V] as in `draws_of`.

    logit_tolerance: largest error of a logit, before temperature, between this forward and the engine's (bfloat16
    rounds logits of 16 to 32 to 0.125). A token that such an error brings across the edge of top-k or top-p, or to the
    argmax at temperature 0, does not count as outside. 0 suits an engine in float32 only up to ties.
    """
    _check(logits, sampler)
    if logit_tolerance < 0:
        raise ValueError(f"logit_tolerance is {logit_tolerance}; use 0 or a positive number of logit units")
    parts = []
    for first in range(0, max(len(logits), 1), chunk_rows):
        rows = slice(first, first + chunk_rows)
        scaled = _scaled(logits[rows], sampler.temperature)
        log_law = _log_probs(scaled, sampler)
        outside = _outside(scaled, log_law, tokens[rows], sampler, logit_tolerance)
        parts.append(draws_of(log_law, tokens[rows], orders, outside))
    return concatenate(parts)


def _check(logits: Tensor, sampler: Sampler) -> None:
    if not 0 <= sampler.temperature < torch.inf:
        raise ValueError(f"temperature is {sampler.temperature}; use 0 (greedy) or a positive number")
    if not 0 < sampler.top_p <= 1:
        raise ValueError(f"top_p is {sampler.top_p}; use a number above 0, 1 is off")
    if sampler.top_k < -1:
        raise ValueError(f"top_k is {sampler.top_k}; use a positive number, 0 or -1 is off")
    if logits.isnan().any():
        raise ValueError("logits: NaN in the target's forward; check its weights before testing the engine")


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(logits)
    return logits / temperature if temperature else logits


def _log_probs(scaled: Tensor, sampler: Sampler) -> Tensor:
    if sampler.temperature == 0:
        hot = torch.full_like(scaled, -torch.inf, dtype=torch.float64)
        return hot.scatter_(1, scaled.argmax(1, keepdim=True), 0.0)
    return truncate(scaled, sampler.top_k, sampler.top_p).double().log_softmax(1)


def _outside(scaled: Tensor, log_law: Tensor, tokens: Tensor, sampler: Sampler, tolerance: float) -> Tensor:
    """[T] True where no error of the logits up to the tolerance makes the token possible.

    With errors up to d, a token gets past another whose logit is up to 2d higher, and a probability m changes by at
    most 2d m (1 - m) to first order: then top-p cuts later than it does here.
    """
    drawn = tokens[:, None]
    impossible = log_law.gather(1, drawn) == -torch.inf
    if not impossible.any():
        return impossible.squeeze(1)
    error = tolerance / (sampler.temperature or 1.0)
    logit = scaled.gather(1, drawn)
    smallest_kept = scaled.masked_fill(log_law == -torch.inf, torch.inf).amin(1, keepdim=True)
    near_edge = logit >= smallest_kept - 2 * error
    if sampler.temperature == 0 or sampler.top_p == 1:
        return (impossible & ~near_edge).squeeze(1)
    in_top_k = truncate(scaled, sampler.top_k, 1.0)
    law = in_top_k.double().softmax(1)
    above = (law * (in_top_k > logit)).sum(1, keepdim=True)
    latest_cut = sampler.top_p + 2 * error * sampler.top_p * (1 - sampler.top_p)
    reached = (in_top_k.gather(1, drawn) > -torch.inf) & (above < latest_cut)
    return (impossible & ~near_edge & ~reached).squeeze(1)
