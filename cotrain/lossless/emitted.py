"""The law of each emitted token: the target's processed distribution, from a forward over the emitted text.

Operations come in vLLM's order: temperature, top-k, top-p, softmax. Logits are processed in float32 (or wider) as the
engine does, so that both cut at the same token; probabilities are float64.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cotrain.lossless.draws import Draws, concatenate, draws_of
from drafters.base import SamplingParams
from drafters.losses import at_least_float32, truncate

CHUNK_ROWS = 64


@torch.no_grad()
def response_draws(
    model: Any,
    prompt_token_ids: list[int],
    token_ids: list[int],
    sampling: SamplingParams,
    orders: Mapping[str, Tensor] | None = None,
    logit_tolerance: float = 0.0,
) -> Draws:
    """Response tokens [T] under the laws of a Hugging Face causal language model; orders as in `draws_of`.

    The output head (a plain one: no scale, no soft cap) is applied to a few rows at a time, so that memory does not
    grow with length x vocabulary. Raises ValueError when the logits are NaN.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt_token_ids + token_ids], device=device)
    hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    hidden, response = hidden[0, len(prompt_token_ids) - 1 :], tokens[0, len(prompt_token_ids) :]
    head, parts = model.get_output_embeddings(), []
    for first in range(0, len(response), CHUNK_ROWS):
        rows = slice(first, first + CHUNK_ROWS)
        parts.append(emitted_draws(head(hidden[rows]).float(), response[rows], sampling, orders, logit_tolerance))
    return concatenate(parts)


def emitted_draws(
    logits: Tensor,
    tokens: Tensor,
    sampling: SamplingParams,
    orders: Mapping[str, Tensor] | None = None,
    logit_tolerance: float = 0.0,
) -> Draws:
    """Emitted tokens [T] under the target's law from logits [T, V]; orders with keys [V] as in `draws_of`.

    logit_tolerance: largest error of a logit, before temperature, between this forward and the engine's (bfloat16
    rounds logits of 16 to 32 to 0.125). A token that such an error brings across the edge of top-k or top-p, or to the
    argmax at temperature 0, does not count as outside. 0 suits an engine in float32 only up to ties.
    """
    log_law = target_log_probs(logits, sampling)
    outside = _outside(_scaled(logits, sampling.temperature), log_law, tokens, sampling, logit_tolerance)
    return draws_of(log_law, tokens, orders, outside)


def target_log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Float64 log-probabilities [T, V] of the processed distribution; -inf outside top-k and top-p.

    logits [T, V]: row t predicts emitted token t. At temperature 0 the argmax has probability 1, as in vLLM. What vLLM
    returns as processed log-probs is this at the emitted tokens. Raises ValueError when a logit is NaN.
    """
    if logits.isnan().any():
        raise ValueError("logits: NaN in the target's forward; check its weights before testing the engine")
    scaled = _scaled(logits, sampling.temperature)
    if sampling.temperature == 0:
        hot = torch.full_like(scaled, -torch.inf, dtype=torch.float64)
        return hot.scatter_(1, scaled.argmax(1, keepdim=True), 0.0)
    return truncate(scaled, sampling.top_k, sampling.top_p).double().log_softmax(1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(logits)
    return logits / temperature if temperature else logits


def _outside(scaled: Tensor, log_law: Tensor, tokens: Tensor, sampling: SamplingParams, tolerance: float) -> Tensor:
    """[T] True where no error of the logits up to the tolerance makes the token possible.

    With errors up to d, a token gets past another whose logit is up to 2d higher, and a probability m changes by at
    most 2d m (1 - m) to first order: then top-p cuts later than it does here.
    """
    drawn = tokens[:, None]
    impossible = log_law.gather(1, drawn) == -torch.inf
    if not impossible.any():
        return impossible.squeeze(1)
    error = tolerance / (sampling.temperature or 1.0)
    logit = scaled.gather(1, drawn)
    smallest_kept = scaled.masked_fill(log_law == -torch.inf, torch.inf).amin(1, keepdim=True)
    explained = logit >= smallest_kept - 2 * error
    if sampling.temperature > 0 and sampling.top_p < 1:
        in_top_k = truncate(scaled, sampling.top_k, 1.0)
        above = (in_top_k.double().softmax(1) * (in_top_k > logit)).sum(1, keepdim=True)
        latest_cut = sampling.top_p + 2 * error * sampling.top_p * (1 - sampling.top_p)
        explained |= (in_top_k.gather(1, drawn) > -torch.inf) & (above < latest_cut)
    return (impossible & ~explained).squeeze(1)
