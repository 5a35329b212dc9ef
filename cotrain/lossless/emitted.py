"""The exact distribution of each emitted token: the target's, after processing, from a forward pass over the emitted text.

Operations come in vLLM's order: temperature, top-k, top-p, softmax. Logits are processed in float32 (or wider) as in the
engine, so that both truncate at the same token; probabilities are float64. A distribution over a whole vocabulary is large,
so it is reduced at once to the few numbers that the tests read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.base import SamplingParams
from drafters.losses import at_least_float32, truncate

ORDERS = ("probability", "draft vocabulary")
"""Orders of outcomes: by descending probability, ties by id; and with those that can be drafted before all others, ties likewise."""

CHUNK_ROWS = 64

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Draws:
    """N outcomes, each drawn from its own distribution. Arrays of shape [N] unless said otherwise; log-probs in nats."""

    probability: Floats
    log_prob: Floats
    before: Floats  # [N, O]: total probability of the outcomes before the drawn one, in the first O of ORDERS
    impossible: NDArray[np.bool_]  # probability is 0; the outcome's numbers are those of the least likely possible one
    outside: NDArray[np.bool_]  # the outcome is impossible, and no numerical error of the distribution explains it

    def __len__(self) -> int:
        return len(self.probability)

    def select(self, index: NDArray[np.bool_] | NDArray[np.int64]) -> "Draws":
        """The draws at the indices, or where the mask is True."""
        return Draws(*(values[index] for values in vars(self).values()))


def draws_of(
    log_probs: Tensor, outcomes: Tensor, drafted: Tensor | None = None, outside: Tensor | None = None
) -> Draws:
    """Reduce log-probabilities [N, V] (-inf: impossible) and the outcomes drawn from them [N].

    drafted [V]: can an outcome be drafted? None if all can, and then there is only the first of ORDERS.
    outside [N]: outcomes of probability 0 that no error of the distribution explains; by default all of probability 0.
    """
    probs = log_probs.double().exp()
    impossible = probs.gather(1, outcomes[:, None]).squeeze(1) == 0
    drawn = torch.where(impossible, probs.masked_fill(probs == 0, torch.inf).argmin(1), outcomes)[:, None]
    drawn_prob = probs.gather(1, drawn)
    ids = torch.arange(probs.shape[1], device=probs.device)
    likelier = probs * ((probs > drawn_prob) | ((probs == drawn_prob) & (ids < drawn)))
    before = [likelier.sum(1)]
    if drafted is not None:
        first = drafted.to(probs.device).expand_as(probs)
        is_first = first.gather(1, drawn)
        before.append((probs * (first > is_first)).sum(1) + (likelier * (first == is_first)).sum(1))
    return Draws(
        probability=drawn_prob.squeeze(1).cpu().numpy(),
        log_prob=log_probs.double().gather(1, drawn).squeeze(1).cpu().numpy(),
        before=torch.stack(before, 1).cpu().numpy(),
        impossible=impossible.cpu().numpy(),
        outside=(impossible if outside is None else outside).cpu().numpy(),
    )


def concatenate(parts: Sequence[Draws]) -> Draws:
    """Concatenate draws. There must be at least one part, and all parts must have the same orders."""
    return Draws(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))


@torch.no_grad()
def response_draws(
    model: Any,
    prompt_token_ids: list[int],
    token_ids: list[int],
    sampling: SamplingParams,
    drafted: Tensor | None = None,
    logit_tolerance: float = 0.0,
) -> Draws:
    """Response tokens [T] under the distributions of a Hugging Face causal language model; drafted as in `draws_of`.

    The output head (a plain one: no scale, no soft cap) is applied to a few rows at a time, so that memory does not
    grow with length x vocabulary. Raises ValueError when the logits are NaN.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt_token_ids + token_ids], device=device)
    hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    hidden, response = hidden[0, len(prompt_token_ids) - 1 :], tokens[0, len(prompt_token_ids) :]
    head, parts = model.get_output_embeddings(), []
    for states, emitted in zip(hidden.split(CHUNK_ROWS), response.split(CHUNK_ROWS), strict=True):
        parts.append(emitted_draws(head(states).float(), emitted, sampling, drafted, logit_tolerance))
    return concatenate(parts)


def emitted_draws(
    logits: Tensor,
    tokens: Tensor,
    sampling: SamplingParams,
    drafted: Tensor | None = None,
    logit_tolerance: float = 0.0,
) -> Draws:
    """Emitted tokens [T] under the target's distribution from logits [T, V]; drafted as in `draws_of`.

    logit_tolerance: largest error of a logit, before temperature, between this forward and the engine's (bfloat16
    rounds logits of 16 to 32 to 0.125). A token that such an error brings across the edge of top-k or top-p, or to the
    argmax at temperature 0, does not count as outside. 0 suits a float32 engine, except for ties.
    """
    log_probs = target_log_probs(logits, sampling)
    outside = _outside(_scaled(logits, sampling.temperature), log_probs, tokens, sampling, logit_tolerance)
    return draws_of(log_probs, tokens, drafted, outside)


def target_log_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Float64 log-probabilities [T, V] of the processed distribution; -inf outside top-k and top-p.

    logits [T, V]: row t predicts emitted token t. At temperature 0 the argmax has probability 1, as in vLLM. vLLM's
    processed log-probs are these values at the emitted tokens. Raises ValueError when a logit is NaN.
    """
    if logits.isnan().any():
        raise ValueError("logits: NaN in the target's forward; check its weights before testing the engine")
    return truncate(_scaled(logits, sampling.temperature), sampling).double().log_softmax(1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(logits)
    return logits / temperature if temperature else logits


def _outside(scaled: Tensor, log_probs: Tensor, tokens: Tensor, sampling: SamplingParams, tolerance: float) -> Tensor:
    """[T] True where no error of the logits up to the tolerance makes the token possible.

    With errors up to d, a token can pass another whose logit is up to 2d higher, and a probability m changes by at
    most 2d m (1 - m) to first order, so that top-p can cut later than it does here.
    """
    drawn = tokens[:, None]
    impossible = log_probs.gather(1, drawn) == -torch.inf
    if not impossible.any():
        return impossible.squeeze(1)
    error = tolerance / (sampling.temperature or 1.0)
    logit = scaled.gather(1, drawn)
    smallest_possible = scaled.masked_fill(log_probs == -torch.inf, torch.inf).amin(1, keepdim=True)
    explained = logit >= smallest_possible - 2 * error
    if sampling.temperature > 0 and sampling.top_p < 1:
        in_top_k = truncate(scaled, replace(sampling, top_p=1.0))
        above = (in_top_k.double().softmax(1) * (in_top_k > logit)).sum(1, keepdim=True)
        latest_cut = sampling.top_p + 2 * error * sampling.top_p * (1 - sampling.top_p)
        explained |= (in_top_k.gather(1, drawn) > -torch.inf) & (above < latest_cut)
    return (impossible & ~explained).squeeze(1)
