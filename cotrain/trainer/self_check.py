"""Checks, in the first step, that what the engine hands over is what the learners take it for.

Hidden states must be the policy's own, layer by layer: an aux layer id that is off by one leaves the output correct, but costs
about 30 % of the acceptance length, with no other sign. The prompt must end where the engine's prompt ended, and each log-prob
must belong to its token: a loss mask off by one makes training worse without anyone noticing. Every problem raises
SelfCheckFailed.
"""

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from cotrain.process.failures import SelfCheckFailed
from cotrain.records import RolloutBatch
from cotrain.transport.features import read_shard

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08}  # largest relative error, by the number format of the engine

LOG_PROB_GAP = {"float32": 0.05, "bfloat16": 0.5}
"""Largest mean |engine's log-prob - learner's| of a step, in nats, by the engine's number format. Rounding gives about
1e-5 and 0.02; log-probs of the neighbouring tokens differ by more than one nat."""

MAX_POSITIONS = 256


def check_features(
    batch: RolloutBatch,
    hidden_states: Callable[[list[int], tuple[int, ...]], tuple[Tensor, Tensor]],
    engine_dtype: str,
    policy_version: int | None = None,
) -> float | None:
    """Compare one tapped rollout, of this policy version if one is given, with the learner's own forward pass.

    hidden_states: (token ids, layers) -> (aux [T, A*H], final [T, H]) of that pass. Each aux layer must also be closer
    to the policy's layer of that id than to its neighbours: where layers change little, an off-by-one can hide below
    the tolerance. Returns the largest relative error, or None if only other versions were tapped.
    """
    if not batch.features:
        raise SelfCheckFailed("no rollout of the first step was tapped; raise rollout.features.max_bytes")
    records = (record for shard in batch.features for record in read_shard(shard))
    record = next((r for r in records if policy_version in (None, r.policy_version)), None)
    if record is None:
        return None
    layers, keep = record.aux_layers, record.feature_mask.nonzero().flatten()[:MAX_POSITIONS]
    # The layer above the top one may be the model's last, which is normed: a shift upwards shows in the others.
    near = sorted({n for layer in layers for n in (layer - 1, layer, layer + 1) if 0 <= n <= layers[-1]})
    aux, final = hidden_states(record.token_ids.tolist(), tuple(near))
    states, tapped = _by_layer(near, aux[keep]), _by_layer(layers, record.aux_hidden[keep])
    distances = {layer: {n: relative_error(tapped[layer], states[n]) for n in near} for layer in layers}
    nearest = [min(near, key=distances[layer].__getitem__) for layer in layers]
    if nearest != list(layers):
        raise SelfCheckFailed(
            f"the engine's hidden states are not those of the configured layers: configured {list(layers)}, they look "
            f"like layers {nearest}; check drafter.model.aux_layers"
        )
    errors = {f"aux layer {layer}": distances[layer][layer] for layer in layers}
    errors["final norm"] = relative_error(record.final_hidden[keep], final[keep])
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > TOLERANCE[engine_dtype]:
        raise SelfCheckFailed(
            f"the engine's hidden states are not the policy's: {worst} differs by {errors[worst]:.3f}, allowed is "
            f"{TOLERANCE[engine_dtype]} in {engine_dtype}; do engine and learner have the same weights?"
        )
    return errors[worst]


def _by_layer(layers: Sequence[int], hidden: Tensor) -> dict[int, Tensor]:
    """Return the states [n, H] of each layer, out of [n, A*H]; empty for a drafter that reads no aux layer."""
    return dict(zip(layers, hidden.chunk(len(layers), dim=1), strict=True)) if layers else {}


def check_records(batch: RolloutBatch, end_token_ids: Collection[int]) -> None:
    """Compare the prompt length and tokens of every tapped rollout with the rollout that was returned.

    No rollout may have tokens behind one of end_token_ids, which end a response; empty if none does (rollout.ignore_eos).
    """
    boundaries = {tuple(r.prompt_token_ids + r.token_ids): len(r.prompt_token_ids) for r in batch.rollouts}
    for record in (record for shard in batch.features for record in read_shard(shard)):
        boundary = boundaries.get(tuple(record.token_ids.tolist()))
        if boundary is None:
            raise SelfCheckFailed("a tapped rollout has other tokens than every rollout that the engine returned")
        if record.prompt_length != boundary:
            raise SelfCheckFailed(
                f"a tapped rollout of {record.num_tokens} tokens is said to have a prompt of {record.prompt_length}, "
                f"the engine was given one of {boundary}: the drafter's loss mask would be off"
            )
    for rollout in (turn for whole in batch.rollouts for turn in whole.turns()):
        end = next((place for place, token in enumerate(rollout.token_ids[:-1]) if token in end_token_ids), None)
        if end is not None:
            raise SelfCheckFailed(
                f"rollout {rollout.prompt_id}/{rollout.sample_index} has {len(rollout.token_ids) - 1 - end} tokens behind the "
                f"end-of-sequence token {rollout.token_ids[end]}: the policy would be trained on text that was never part of the response"
            )


def check_log_probs(mean_gap: float, engine_dtype: str) -> None:
    """Check mean_gap, the learner's policy/rollout_log_prob_gap before the policy has moved, against LOG_PROB_GAP.

    Not for truncated sampling (top_p, top_k), whose log-probs the learner does not compute.
    """
    if not mean_gap <= LOG_PROB_GAP[engine_dtype]:
        raise SelfCheckFailed(
            f"the engine's log-probs differ from the learner's by {mean_gap:.3f} nats on average, allowed are "
            f"{LOG_PROB_GAP[engine_dtype]} in {engine_dtype}: they belong to other tokens (a prompt boundary off by "
            "one), to other weights, or to another temperature"
        )


def relative_error(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of the difference over that of b; infinite when this is NaN, so that no check passes."""
    error = float(torch.linalg.norm(a.float() - b.float()) / torch.linalg.norm(b.float()))
    return math.inf if math.isnan(error) else error
