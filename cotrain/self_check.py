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

    Each aux layer must also be closer to the policy's layer of that id than to its neighbours: where layers change
    little, an off-by-one can hide below the tolerance. Raises RuntimeError naming the layers.
    """
    if not batch.features:
        raise RuntimeError("no rollout of the first step was tapped; raise rollout.features.max_bytes")
    record = read_shard(batch.features[0].path)[0]
    layers = record.aux_layers
    keep = record.feature_mask.nonzero().flatten()[:MAX_POSITIONS]
    # not above the top one, which may be the model's last: a shift upwards shows in the others
    near = {n for layer in layers for n in (layer - 1, layer, layer + 1)}
    candidates = tuple(sorted(n for n in near if 0 <= n <= layers[-1]))
    aux, final = policy.hidden_states(record.token_ids.tolist(), candidates)
    width = final.shape[1]
    errors, nearest = {"final norm": relative_error(record.final_hidden[keep], final[keep])}, []
    for i, layer in enumerate(layers):
        tapped = record.aux_hidden[keep, i * width : (i + 1) * width]
        distances = {
            candidate: relative_error(tapped, aux[keep, j * width : (j + 1) * width])
            for j, candidate in enumerate(candidates)
        }
        errors[f"aux layer {layer}"] = distances[layer]
        nearest.append(min(distances, key=lambda candidate: distances[candidate]))
    worst = max(errors, key=lambda name: errors[name])
    if nearest != list(layers):
        raise RuntimeError(
            f"the engine's hidden states are not those of the configured layers: configured {list(layers)}, they look "
            f"like layers {nearest}; check drafter.model.aux_layers"
        )
    if errors[worst] > TOLERANCE[engine_dtype]:
        raise RuntimeError(
            f"the engine's hidden states are not the policy's: {worst} differs by {errors[worst]:.3f}, allowed is "
            f"{TOLERANCE[engine_dtype]} in {engine_dtype}; do engine and learner have the same weights?"
        )
    return errors[worst]


def relative_error(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of the difference over that of b; infinite when that is no number, so that no check passes."""
    error = float(torch.linalg.norm(a.float() - b.float()) / torch.linalg.norm(b.float()))
    return math.inf if math.isnan(error) else error
