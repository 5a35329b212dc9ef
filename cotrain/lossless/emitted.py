"""From rollouts to checks: each token's law from a forward pass of the target, tokens sorted by their place in a step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.lossless.draws import Draws, Floats, concatenate
from cotrain.lossless.family import CheckResult
from cotrain.lossless.goodness import log_prob_check, returned_log_prob_check, support_check, uniformity_check
from cotrain.lossless.target_law import emitted_draws
from cotrain.lossless.verification import UNKNOWN, by_stratum, response_strata
from cotrain.records import Rollout
from drafters.base import Sampler

LOGIT_ERROR = {"float32": 5e-4, "bfloat16": 0.25}
"""Largest difference of a logit between the engine in this number format and a float32 forward of the same weights:
kernels that add up in another order, or two units in the last place of a logit of 16 to 32."""

RARE_EDGES = 0.01
"""Logit error from which on top-k and top-p often cut at another token than the law does."""

AT_LEAST = 100
"""Fewest tokens of a stratum that get checks of their own."""

CHUNK_ROWS = 64


@torch.no_grad()
def response_draws(
    model: Any,
    prompt_token_ids: list[int],
    token_ids: list[int],
    sampler: Sampler,
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
        parts.append(emitted_draws(head(hidden[rows]).float(), response[rows], sampler, orders, logit_tolerance))
    return concatenate(parts)


def log_prob_tolerance(sampler: Sampler, logit_error: float) -> tuple[float, float]:
    """(nats by which a returned log-prob may differ from the law's, and how much more where truncation cuts elsewhere).

    A logit error changes a log-prob by up to twice itself. Where top-p cuts one token later, what is kept grows to at
    most 1, from top_p at least. Top-k keeps all tokens whose logit equals the k-th, in vLLM too: a tie that only one of
    the two has is a token of at most 1/k of what the other keeps. Both are rare with small errors, and common from
    RARE_EDGES on.
    """
    if sampler.temperature == 0:
        raise ValueError("temperature is 0: greedy log-probs are those of the unprocessed logits, not of the law")
    edge = -math.log(sampler.top_p) + (math.log1p(1 / sampler.top_k) if sampler.top_k > 0 else 0.0)
    error = 2 * logit_error / sampler.temperature
    return (error, edge) if logit_error < RARE_EDGES else (error + edge, 0.0)


def setting_checks(
    rollouts: Sequence[Rollout],
    samplers: Sequence[Sampler],
    draws: Sequence[Draws],
    name: str,
    rng: np.random.Generator,
    logit_error: float,
) -> list[CheckResult]:
    """All checks of one setting's rollouts; samplers and draws are one for each. logit_error: see LOGIT_ERROR.

    Greedy requests of a mixed batch count for `support` alone: their only possible token has probability 1.
    """
    together = concatenate(draws)
    results = [support_check(together, name)]
    lengths = [len(part) for part in draws]
    sampled = np.repeat([sampler.temperature > 0 for sampler in samplers], lengths)
    if not sampled.any():
        return results
    random = together.select(sampled)
    results += distribution_checks(random, name, rng)
    tolerances = [log_prob_tolerance(s, logit_error) if s.temperature else (0.0, 0.0) for s in samplers]
    tolerance, edge = (np.repeat([pair[i] for pair in tolerances], lengths)[sampled] for i in range(2))
    returned: Floats = np.concatenate([r.log_probs for r in rollouts])[sampled]
    results.append(returned_log_prob_check(returned, random, name, tolerance, edge))

    strata = np.concatenate([response_strata(r.verification_steps, len(r.token_ids)) for r in rollouts])[sampled]
    if len(set(strata)) > 1:
        for stratum, part in by_stratum(random, strata, AT_LEAST).items():
            if stratum != UNKNOWN:
                results += distribution_checks(part, f"{name}: {stratum}", rng)
    return results


def distribution_checks(draws: Draws, name: str, rng: np.random.Generator) -> list[CheckResult]:
    """Log-probs, and uniformity by each order."""
    return [log_prob_check(draws, name), *(uniformity_check(draws, name, rng, order) for order in draws.before)]
