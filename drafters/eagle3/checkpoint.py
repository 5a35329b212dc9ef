"""The checkpoint folder of an EAGLE-3 drafter: one format that vLLM, SGLang and speculators all load.

config.json is a flat Llama config with the fields of vLLM and SGLang, and the fields of speculators beside them. Two
counts of the target's layers are in use. vLLM and speculators read the top-level ids, where id k is the state after k
layers; SGLang reads those under eagle_config, where id k is the output of layer k, one less. Both are written.
Tensors are named layers.0.*; midlayer.*, the older name, is read as well.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.base import TargetSpec, read_config, read_tensors, rope_parameters
from drafters.eagle3.layer import Eagle3Shape

UNSUPPORTED_FLAGS = ("norm_before_fc", "norm_output", "attention_bias")
"""Variants that vLLM serves and this drafter does not compute."""


def to_config(shape: Eagle3Shape) -> dict[str, object]:
    """Contents of config.json."""
    llama = {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama,
        "eos_token_id": list(shape.eos_token_ids) or None,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.aux_layers],
        },
        # Always written out: the defaults of a missing flag differ between vLLM's two config readers.
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": False,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.trained_depth}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": llama,
    }


def from_config(
    config: dict[str, Any], target: TargetSpec, source: str | Path, depth_if_unstated: int | None
) -> Eagle3Shape:
    """Shape of a checkpoint's config.json. Raises ValueError when it is not for this target, or of another variant.

    The position limit stays the checkpoint's own, because engines stop drafting there: see `load_drafter`.
    """

    def required(name: str) -> Any:
        if config.get(name) is None:
            raise ValueError(f"{source}/config.json has no {name}; it is not a flat EAGLE-3 config")
        return config[name]

    for flag in UNSUPPORTED_FLAGS:
        if config.get(flag):
            raise ValueError(f"{source} is an EAGLE-3 variant with {flag}, which is not supported")
    if required("num_hidden_layers") != 1:
        raise ValueError(f"{source} has {config['num_hidden_layers']} layers; only one-layer drafters are supported")
    vocab_size, hidden_size = required("vocab_size"), required("hidden_size")
    for name, theirs, ours in [
        ("vocabulary", vocab_size, target.vocab_size),
        ("hidden size", hidden_size, target.hidden_size),
        ("hidden size", config.get("target_hidden_size", hidden_size), target.hidden_size),
    ]:
        if theirs != ours:
            raise ValueError(f"{source} was made for another target: its {name} is {theirs}, this target's is {ours}")
    _check_rope_type(config, source)
    heads = required("num_attention_heads")
    return Eagle3Shape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=required("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden_size // heads,
        rms_norm_eps=required("rms_norm_eps"),
        rope_theta=rope_parameters(config).get("rope_theta") or required("rope_theta"),
        max_position_embeddings=required("max_position_embeddings"),
        eos_token_ids=target.eos_token_ids,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        aux_layers=check_aux_layers(config.get("eagle_aux_hidden_state_layer_ids"), target, f"{source}/config.json"),
        trained_depth=_trained_depth(config, source, depth_if_unstated),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )


def check_aux_layers(layers: Any, target: TargetSpec, field: str) -> tuple[int, ...]:
    """The ids, or default ones for None. Raises ValueError unless strictly ascending and inside the target."""
    layers = default_aux_layers(target) if layers is None else tuple(layers)
    if list(layers) != sorted(set(layers)):
        # vLLM sorts the ids and drops duplicates, so that fc would get fewer or other columns than it was trained on.
        raise ValueError(f"{field}: aux layers {list(layers)} must be ascending and different")
    if layers[0] < 1 or layers[-1] >= target.num_layers:
        raise ValueError(
            f"{field}: aux layers {list(layers)} are not all between 1 and {target.num_layers - 1}, "
            f"the states between the target's {target.num_layers} layers"
        )
    return layers


def default_aux_layers(target: TargetSpec) -> tuple[int, int, int]:
    """(2, N//2, N-3) for a target of N layers, the default of every engine.

    Raises ValueError for small targets, where these collide.
    """
    layers = (2, target.num_layers // 2, target.num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise ValueError(
            f"drafter.model.aux_layers: the default {list(layers)} has duplicates or is out of order for a target of "
            f"{target.num_layers} layers; set three ascending ids between 1 and {target.num_layers - 1}"
        )
    return layers


def _check_rope_type(config: dict[str, Any], source: str | Path) -> None:
    """Raise ValueError for scaled rotary positions."""
    rope = rope_parameters(config)
    found = rope.get("rope_type", rope.get("type", "default"))
    if found != "default":
        raise ValueError(
            f"{source}/config.json has rope_type {found!r}; this drafter rotates by plain rope_theta, so the checkpoint "
            "would be trained and scored at other positions than it is served at. Only rope_type 'default' is supported"
        )


def _trained_depth(config: dict[str, Any], source: str | Path, depth_if_unstated: int | None) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens") or depth_if_unstated
    if depth is None:
        raise ValueError(
            f"{source}/config.json does not say how many draft positions were trained; add "
            '"speculators_config": {"proposal_methods": [{"speculative_tokens": K}]}'
        )
    return depth


def read_checkpoint(
    folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
) -> tuple[Eagle3Shape, dict[str, Tensor]]:
    """Shape and tensors of a folder, in layers.0.* names. Raises ValueError as `from_config` and `read_tensors` do.

    An embedding in the file is left out: the drafter always reads the target's, of the newest policy version.
    """
    shape = from_config(read_config(folder), target, folder, depth_if_unstated)
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in read_tensors(folder).items()
        if name != "embed_tokens.weight"
    }
    return shape, tensors
