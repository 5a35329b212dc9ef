"""The checkpoint folder of an EAGLE-3 drafter: one format that vLLM, SGLang and speculators all load.

config.json is a flat Llama config with the fields of vLLM and SGLang, and the fields of speculators beside them. Two
counts of the target's layers are in use. vLLM and speculators read the top-level ids, where id k is the state after k
layers; SGLang reads those under eagle_config, where id k is the output of layer k, one less. Both are written.
Tensors are named layers.0.*; midlayer.*, the older name, is read as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.base import Shape, TargetSpec, read_tensors
from drafters.files import read_config

UNSUPPORTED_FLAGS = ("norm_before_fc", "norm_output", "attention_bias")
"""Variants that vLLM serves and this drafter does not compute."""


@dataclass(frozen=True)
class Eagle3Shape(Shape):
    """Heads, MLP, rotation and positions of `sizes` are the drafter's own."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # ascending; id k = Hugging Face hidden_states[k]
    fc_norm: bool
    norm_before_residual: bool


def to_config(shape: Eagle3Shape) -> dict[str, object]:
    own = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    llama = shape.sizes.layer_config() | own
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama,
        "eos_token_id": list(shape.sizes.eos_token_ids) or None,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.sizes.hidden_size,
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


def read_checkpoint(
    folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
) -> tuple[Eagle3Shape, dict[str, Tensor]]:
    """Read shape and tensors of a folder, in layers.0.* names; the position limit stays the checkpoint's own.

    An embedding in the file is left out: the drafter always reads the target's, of the newest policy version. Raises
    ValueError when the drafter is not for this target, or of another variant, or its files are broken.
    """
    config = read_config(folder)
    sizes = TargetSpec.from_config(config, folder)
    if problems := "; ".join(_problems(config, sizes)):
        raise ValueError(f"{folder}/config.json: {problems}")
    sizes.check_made_for(target, ("vocab_size", "hidden_size"), folder)
    of_target = replace(sizes, hidden_size=config.get("target_hidden_size", sizes.hidden_size))
    of_target.check_made_for(target, ("hidden_size",), folder)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens") or depth_if_unstated
    if depth is None:
        raise ValueError(
            f"{folder}/config.json does not say how many draft positions were trained; add "
            '"speculators_config": {"proposal_methods": [{"speculative_tokens": K}]}'
        )
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    shape = Eagle3Shape(
        sizes=replace(sizes, eos_token_ids=target.eos_token_ids, partial_rotary_factor=1.0),
        trained_depth=depth,
        draft_vocab_size=config.get("draft_vocab_size") or sizes.vocab_size,
        aux_layers=check_aux_layers(layers, target, f"{folder}/config.json"),
        fc_norm=bool(config.get("fc_norm")),
        norm_before_residual=bool(config.get("norm_before_residual")),
    )
    tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in read_tensors(folder).items()}
    tensors.pop("embed_tokens.weight", None)
    return shape, tensors


def _problems(config: dict[str, Any], sizes: TargetSpec) -> Iterator[str]:
    """Yield what keeps this drafter from computing what an engine would."""
    for flag in UNSUPPORTED_FLAGS:
        if config.get(flag):
            yield f"this is an EAGLE-3 variant with {flag}, which is not supported"
    if sizes.num_layers != 1:
        yield f"the drafter has {sizes.num_layers} layers; only one is supported"
    if sizes.rope_type != "default":
        yield f"rope_type {sizes.rope_type!r} is not supported; the drafter would be trained at other positions than it is served at"


def check_aux_layers(layers: Any, target: TargetSpec, field: str) -> tuple[int, ...]:
    """Return the ids, or for None every engine's default of (2, N//2, N-3) for a target of N layers.

    Raises ValueError naming `field` unless they are strictly ascending and inside the target. The defaults are not
    for small targets.
    """
    last = target.num_layers - 1
    name = "the default aux layers" if layers is None else "aux layers"
    layers = (2, target.num_layers // 2, last - 2) if layers is None else tuple(layers)
    # vLLM sorts the ids and drops duplicates, so that fc would get fewer or other columns than it was trained on.
    if list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > last:
        raise ValueError(
            f"{field}: {name} {list(layers)} are not ascending ids between 1 and {last}, the states between the target's "
            f"{target.num_layers} layers; set three such ids"
        )
    return layers
