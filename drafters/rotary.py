"""Rotary positions of a drafter's heads, by the rope_parameters of its configuration, as transformers and vLLM compute them."""

import torch
from torch import Tensor

from drafters.target import TargetSpec

BY_LENGTH = ("dynamic", "longrope")
"""Rotations that transformers changes with the length of a sequence and vLLM with that of the engine's longest."""


def inverse_frequencies(sizes: TargetSpec) -> tuple[Tensor, float]:
    """Return the angles [rotated dimensions / 2] of one position, on the CPU in float32, and the factor on cos and sin.

    Raises ValueError naming the rope_type when it is none that can be trained, or its parameters are wrong.
    """
    rope, kind = sizes.rope_parameters, sizes.rope_parameters["rope_type"]
    if kind in BY_LENGTH:
        raise ValueError(f"rope_type {kind!r} follows the length of the sequence, which is not supported")
    with torch.device("cpu"):
        if kind == "default":  # transformers has no function for it
            size = int(sizes.head_dim * rope.get("partial_rotary_factor", 1.0))
            return 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        head: dict[str, int] = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
        head |= dict.fromkeys(("hidden_size", "head_dim"), sizes.head_dim)
        try:
            config = LlamaConfig(
                **head, max_position_embeddings=sizes.max_position_embeddings, rope_parameters=dict(rope)
            )
            return ROPE_INIT_FUNCTIONS[kind](config, None)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"rope_parameters {rope} cannot be computed: {error}") from error
