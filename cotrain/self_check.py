"""At start: are the hidden states tapped from the engine those of the policy, layer by layer?

An aux layer id off by one leaves output correct and costs about 30 % of the acceptance length, with no other sign.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from cotrain.drafting.features import read_shard
from cotrain.records import RolloutBatch

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08}
"""Largest relative error of a layer's hidden states, by the engine's number format."""

MAX_POSITIONS = 256


class ReferenceForward(Protocol):
    """The policy learner, as far as this check needs it."""

    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(aux [T, A*H], final [T, H])."""
        ...


def check_features(batch: RolloutBatch, policy: ReferenceForward, engine_dtype: str) -> float:
    """Compare one tapped rollout with the learner's own forward. Returns the largest relative error.

    Raises RuntimeError naming the layer that does not fit, and the one that would.
    """
    if not batch.features:
        raise RuntimeError("no rollout of the first step was tapped; raise rollout.features.max_bytes")
    shard = batch.features[0]
    record = read_shard(shard.path)[0]
    layers = record.aux_layers
    keep = record.feature_mask.nonzero().flatten()[:MAX_POSITIONS]
    token_ids = record.token_ids.tolist()
    aux, final = policy.hidden_states(token_ids, layers)
    width = final.shape[1]
    errors = {}
    for i, layer in enumerate(layers):
        tapped = record.aux_hidden[keep, i * width : (i + 1) * width]
        errors[f"aux layer {layer}"] = relative_error(tapped, aux[keep, i * width : (i + 1) * width])
    errors["final norm"] = relative_error(record.final_hidden[keep], final[keep])
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > TOLERANCE[engine_dtype]:
        raise RuntimeError(
            f"the engine's hidden states are not the policy's: {worst} differs by {errors[worst]:.3f} (allowed "
            f"{TOLERANCE[engine_dtype]}). {_likely_layers(record, keep, policy, token_ids, width)}"
        )
    return errors[worst]


def relative_error(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of the difference over that of b; infinite when that is no number, so that no check passes."""
    error = float(torch.linalg.norm(a.float() - b.float()) / torch.linalg.norm(b.float()))
    return math.inf if math.isnan(error) else error


def _likely_layers(record, keep: Tensor, policy: ReferenceForward, token_ids: list[int], width: int) -> str:
    """Which layers the tapped states really are: an off-by-one shows as a shift of all ids."""
    neighbours = tuple(sorted({n for layer in record.aux_layers for n in (layer - 1, layer, layer + 1) if n >= 0}))
    reference, _ = policy.hidden_states(token_ids, neighbours)
    found = []
    for i in range(len(record.aux_layers)):
        tapped = record.aux_hidden[keep, i * width : (i + 1) * width]
        errors = [
            relative_error(tapped, reference[keep, j * width : (j + 1) * width]) for j in range(len(neighbours))
        ]
        found.append(neighbours[errors.index(min(errors))])
    return f"Configured layers {list(record.aux_layers)}, states look like layers {found}: check drafter.model.aux_layers"
