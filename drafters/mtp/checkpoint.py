"""The checkpoint folder of an MTP head, which stock vLLM serves beside its target.

It holds the head's tensors under the names of its format, and nothing of the target. vLLM reads the sizes of the head
from the target's configuration, so a head of other sizes than the target's is refused here.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.base import TargetSpec, read_config, read_tensors, rope_parameters
from drafters.mtp.formats import FORMATS, MIMO, NUM_HEADS, QWEN3_NEXT, SCRATCH_TARGETS, format_of
from drafters.mtp.layer import MtpShape

TRAINED_DEPTH = "trained_draft_positions"


def to_config(shape: MtpShape) -> dict[str, object]:
    """Contents of config.json."""
    return FORMATS[shape.format].config | {
        NUM_HEADS: 1,
        TRAINED_DEPTH: shape.trained_depth,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        },
        "max_position_embeddings": shape.max_position_embeddings,
        "eos_token_id": list(shape.eos_token_ids) or None,
        "tie_word_embeddings": False,
        "num_experts": shape.experts.number if shape.experts else 0,
    }


def shape_for(target: TargetSpec, trained_depth: int) -> MtpShape:
    """Shape of a new head for a target. Raises ValueError when vLLM cannot serve one beside it."""
    return _shape(target, target.max_position_embeddings, trained_depth)


def from_config(
    config: dict[str, Any], target: TargetSpec, source: str | Path, depth_if_unstated: int | None
) -> MtpShape:
    """Shape of a checkpoint's config.json. Raises ValueError when it is not for this target, or has other heads.

    depth_if_unstated: draft positions trained, for a head that does not say (1 when None).
    """
    num_heads = config.get(NUM_HEADS) or 1
    if num_heads != 1:
        raise ValueError(
            f"{source} has {num_heads} MTP heads ({NUM_HEADS}), one for each draft position; vLLM runs the first of them "
            "again for every position, so only a single head is trained and served"
        )
    shape = _shape(
        target,
        config.get("max_position_embeddings") or target.max_position_embeddings,
        config.get(TRAINED_DEPTH) or depth_if_unstated or 1,
    )
    if format_of(config).name != shape.format:
        raise ValueError(
            f"{source} is an MTP head of format {format_of(config).name}; a target of model_type {target.model_type} is "
            f"served with one of format {shape.format}"
        )
    theirs = {"partial_rotary_factor": 1.0, **config, **rope_parameters(config)}
    for name, wanted in (
        ("vocab_size", shape.vocab_size),
        ("hidden_size", shape.hidden_size),
        ("intermediate_size", shape.intermediate_size),
        ("num_attention_heads", shape.num_attention_heads),
        ("num_key_value_heads", shape.num_key_value_heads),
        ("rms_norm_eps", shape.rms_norm_eps),
        ("rope_theta", shape.rope_theta),
        ("partial_rotary_factor", target.partial_rotary_factor),
    ):
        if theirs.get(name) != wanted:
            raise ValueError(
                f"{source} is the MTP head of another model: its {name} is {theirs.get(name)}, this target's is {wanted}"
            )
    return shape


def read_checkpoint(
    folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
) -> tuple[MtpShape, dict[str, Tensor]]:
    """Shape and tensors of a folder. Raises ValueError as `from_config` and `read_tensors` do."""
    shape = from_config(read_config(folder), target, folder, depth_if_unstated)
    return shape, read_tensors(folder)


def _shape(target: TargetSpec, max_positions: int, trained_depth: int) -> MtpShape:
    head_format = FORMATS[_check(target)]
    head_dim = head_format.head_dim(target)
    return MtpShape(
        format=head_format.name,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=target.num_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rotary_dim=int(head_dim * target.partial_rotary_factor),
        max_position_embeddings=max_positions,
        eos_token_ids=target.eos_token_ids,
        trained_depth=trained_depth,
        experts=target.experts,
    )


def _check(target: TargetSpec) -> str:
    """Format of the head of a target. Raises ValueError when vLLM cannot serve one beside it."""
    found = SCRATCH_TARGETS.get(target.model_type)
    if found is None:
        problem = (
            f"there is no checkpoint format of MTP heads for a target of model_type {target.model_type} (there is one "
            f"for {', '.join(SCRATCH_TARGETS)})"
        )
    elif target.rope_type != "default":
        problem = f'MTP heads rotate as their target does, and only rope_type "default" can be trained, not {target.rope_type!r}'
    elif found == MIMO and target.hidden_size % target.num_attention_heads:
        problem = (
            f"MTP heads need a hidden size that their {target.num_attention_heads} attention heads divide, the target "
            f"has {target.hidden_size}"
        )
    elif (found == QWEN3_NEXT) != (target.experts is not None):
        has, needs = ("a", "no") if target.experts else ("no", "a")
        problem = (
            f"the target's first layer has {has} mixture of experts, where vLLM's head of this format needs {needs}"
        )
    else:
        return found
    raise ValueError(f'drafter.model.type: {problem}; use type = "eagle3"')
