"""The checkpoint folder of an MTP head, which stock vLLM serves beside its target.

It holds the head's tensors under the names of its format, and nothing of the target. vLLM reads the sizes of the head
from the target's configuration, so a head of other sizes than the target's is refused here.
"""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from drafters.base import Shape, TargetSpec
from drafters.checkpoint import read_tensors
from drafters.files import read_config
from drafters.mtp.formats import NUM_HEADS, TARGETS, head_sizes

TRAINED_DEPTH = "trained_draft_positions"


def to_config(shape: Shape) -> dict[str, object]:
    sizes, head_format = shape.sizes, TARGETS[shape.sizes.model_type]
    rope = {"rope_theta": sizes.rope_theta, "partial_rotary_factor": sizes.partial_rotary_factor}
    return {
        "architectures": [head_format.architecture],
        "model_type": head_format.model_type,
        NUM_HEADS: 1,
        TRAINED_DEPTH: shape.trained_depth,
        **sizes.layer_config(),
        "num_hidden_layers": sizes.num_layers,
        "rope_parameters": {"rope_type": "default", **rope},
        "eos_token_id": list(sizes.eos_token_ids) or None,
        "num_experts": sizes.experts.number if sizes.experts else 0,
    }


def read_checkpoint(
    folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
) -> tuple[Shape, dict[str, Tensor]]:
    """Read shape and tensors of a folder. Raises ValueError when it is broken, for another target, or of several heads.

    depth_if_unstated: draft positions trained, for a head that does not say (1 when None).
    """
    config = read_config(folder)
    num_heads = config.get(NUM_HEADS) or 1
    if num_heads != 1:
        raise ValueError(
            f"{folder} has {num_heads} MTP heads ({NUM_HEADS}), one for each draft position; vLLM runs the first "
            "again for every position, so only a single head is trained and served"
        )
    sizes, wanted = head_sizes(target), TARGETS[target.model_type].architecture
    if config["architectures"][0] != wanted:
        raise ValueError(
            f"{folder} is an MTP head of format {config['architectures'][0]}; a target of model_type "
            f"{target.model_type} is served with one of format {wanted}"
        )
    stated = {name: value for name, value in config.items() if value is not None}
    theirs = TargetSpec.from_config({"max_position_embeddings": target.max_position_embeddings} | stated, folder)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "rope_theta", "partial_rotary_factor",
    ):  # fmt: skip
        if getattr(theirs, name) != getattr(target, name):
            raise ValueError(
                f"{folder} is the MTP head of another model: its {name} is {getattr(theirs, name)}, this target's is "
                f"{getattr(target, name)}"
            )
    shape = Shape(
        sizes=replace(sizes, max_position_embeddings=theirs.max_position_embeddings),
        trained_depth=config.get(TRAINED_DEPTH) or depth_if_unstated or 1,
    )
    return shape, read_tensors(folder)
