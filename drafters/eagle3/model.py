"""The EAGLE-3 drafter: fc over aux hidden states, Llama decoder layers, final norm, head over a draft vocabulary.

Tensor names are those of its checkpoint. The target's embedding and head are borrowed for each loss, never kept.

The checkpoint folder is in the one format that vLLM, SGLang and speculators all load. config.json is a flat Llama config with
the fields of vLLM and SGLang, and the fields of speculators beside them. Layer ids are written in both of the conventions in use:
vLLM and speculators read the top-level ids, where id k is the state after k layers. SGLang reads the ids under eagle_config,
where id k is the output of layer k; they are one less, and are read where there are no others. Tensors are named layers.0.*; the older name midlayer.* is read too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.aux_layers import AUX_LAYERS, AuxDrafter, AuxShape, check_aux_layers, new_shape, unsupported
from drafters.base import ServingSpec, TargetSpec, TargetWeights, read_tensors
from drafters.config import Eagle3Config
from drafters.target import other_values, read_sizes
from drafters.unroll import Attention, DraftLayer, unroll

SUPPORTED: dict[str, object] = {
    "hidden_act": "silu", "logit_scale": 1, "is_causal": True, "quantization_config": None,
    **dict.fromkeys(("mlp_bias", "bias", "qkv_bias"), False),
}  # fmt: skip
"""Fields that vLLM reads of a drafter's config.json, with the only value that this drafter implements."""

MODEL_TYPES = ("llama", "phi3", "qwen2")
"""Those with which vLLM builds the same layers from the same fields."""

NESTED: dict[str, object] = {"use_aux_hidden_state": True}
"""The same as `SUPPORTED`, for fields of eagle_config."""

FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


@dataclass(frozen=True)
class Eagle3Shape(AuxShape):
    """Shape of an EAGLE-3 drafter. In `sizes`, layers, attention, MLP width, RoPE and positions are the drafter's own."""

    fc_norm: bool = True  # a norm for each aux layer
    norm_before_fc: bool = False  # one norm over all of them
    norm_before_residual: bool = False
    norm_output: bool = False  # what is fed back has passed the final norm


class DecoderLayer(DraftLayer):
    """A layer of vLLM's llama_eagle3.py. The first reads the normed embedding and hidden state side by side, the others a Llama's input."""

    def __init__(self, shape: Eagle3Shape, is_first: bool) -> None:
        size, eps, bias = shape.sizes.hidden_size, shape.sizes.rms_norm_eps, shape.sizes.attention_bias
        super().__init__(Attention(shape.sizes, size * (1 + is_first), output_bias=bias))
        self.is_first, self.norm_before_residual = is_first, shape.norm_before_residual
        if is_first:
            self.hidden_norm = nn.RMSNorm(size, eps)

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_first:
            return super().attention_input(embeddings, hidden, positions)
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return x, normed if self.norm_before_residual else hidden


class Eagle3Drafter(AuxDrafter):
    """EAGLE-3 with a trainable head."""

    shape: Eagle3Shape

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        self.serving = ServingSpec("eagle3", shape.aux_layers)
        size, eps, num_layers = shape.sizes.hidden_size, shape.sizes.rms_norm_eps, len(shape.aux_layers)
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_layers * size, eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(size, eps) for _ in range(num_layers)])
        self.fc = nn.Linear(num_layers * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape, number == 0) for number in range(shape.sizes.num_layers)])
        self.norm = nn.RMSNorm(size, eps)
        self.add_head()

    @staticmethod
    def shape_of(config: Eagle3Config, target: TargetSpec) -> Eagle3Shape:
        return Eagle3Shape(**vars(new_shape(config, target)))

    @staticmethod
    def read(
        folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
    ) -> tuple[Eagle3Shape, dict[str, Tensor]]:
        config, sizes = read_sizes(folder, target, _problems)
        hidden_size = config.get("target_hidden_size", sizes.hidden_size)
        replace(sizes, hidden_size=hidden_size).check_made_for(target, ("hidden_size",), folder)
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        depth = methods[0].get("speculative_tokens") or depth_if_unstated
        if depth is None:
            fix = 'add "speculators_config": {"proposal_methods": [{"speculative_tokens": K}]}'
            raise ValueError(f"{folder}/config.json does not say how many draft positions were trained; {fix}")
        slides = "sliding_attention" in (config.get("layer_types") or ())
        window = config["sliding_window"] if slides else target.sliding_window
        nested = config.get("eagle_config") or {}
        aux_layers = config.get(AUX_LAYERS) or [layer + 1 for layer in nested.get(AUX_LAYERS) or ()] or None
        shape = Eagle3Shape(
            sizes=replace(sizes, sliding_window=window),
            trained_depth=depth,
            draft_vocab_size=config.get("draft_vocab_size") or sizes.vocab_size,
            aux_layers=check_aux_layers(aux_layers, target, f"{folder}/config.json"),
            **{name: bool((config | nested if name == "norm_before_fc" else config).get(name)) for name in FLAGS},
        )
        tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in read_tensors(folder).items()}
        # The target's embedding, at the newest policy version, is used; and vLLM's layers after the first have a norm without use.
        unused = ["embed_tokens.weight", *(f"layers.{n}.hidden_norm.weight" for n in range(1, sizes.num_layers))]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in unused}
        return shape, tensors

    @staticmethod
    def to_config(shape: Eagle3Shape) -> dict[str, object]:
        sizes = shape.sizes
        own = {"model_type": "llama", "attention_bias": sizes.attention_bias}
        slides = {} if sizes.sliding_window is None else {"layer_types": ["sliding_attention"] * sizes.num_layers}
        llama = sizes.layer_config() | own | {"mlp_bias": False} | slides
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **llama,
            "draft_vocab_size": shape.draft_vocab_size,
            "target_hidden_size": sizes.hidden_size,
            AUX_LAYERS: list(shape.aux_layers),
            "eagle_config": {"use_aux_hidden_state": True, AUX_LAYERS: [layer - 1 for layer in shape.aux_layers]},
            # Always written out: the defaults of a missing flag differ between vLLM's two config readers.
            **{name: getattr(shape, name) for name in FLAGS},
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

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """Return the drafter's first hidden state [R, H], from the hidden states of the A aux layers [R, A*H]."""
        if self.shape.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.shape.fc_norm:
            chunks = aux_hidden.chunk(len(self.fc_norm), dim=-1)
            aux_hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux_hidden)

    def load_tensors(self, tensors: dict[str, Tensor], source: str | Path, assign: bool = False) -> None:
        t2d = tensors.get("t2d")
        super().load_tensors({name: tensor for name, tensor in tensors.items() if name != "t2d"}, source, assign)
        if t2d is not None and not torch.equal(t2d.nonzero().squeeze(1), self.draft_to_target.to(t2d.device)):
            raise ValueError(f"{source}: d2t and t2d do not name the same ascending token ids")

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        hidden = unroll(
            self.fuse, layers, self.norm, batch.aux_hidden, batch, alignment, target.embedding, self.shape.norm_output
        )
        return hidden, self.lm_head.weight

    def saved_state(self) -> dict[str, Tensor]:
        """Return what vLLM loads, and t2d [V], which says for each target id whether it is in the draft vocabulary."""
        if not self.has_map:
            return super().saved_state()
        t2d = torch.zeros(self.shape.sizes.vocab_size, dtype=torch.bool, device=self.d2t.device)
        t2d[self.draft_to_target] = True
        return super().saved_state() | {"t2d": t2d}


def _problems(config: dict[str, Any], sizes: TargetSpec) -> Iterator[str]:
    """Yield each reason why this drafter would not compute what an engine computes from the same checkpoint."""
    fields = other_values(config, SUPPORTED) + other_values(config.get("eagle_config") or {}, NESTED)
    yield from unsupported("an EAGLE-3", fields, sizes)
    if sizes.model_type not in MODEL_TYPES:
        yield f"model_type {sizes.model_type} is not supported ({', '.join(MODEL_TYPES)} are)"
    if sizes.hidden_size % sizes.num_attention_heads:
        yield f"transformers takes no hidden_size {sizes.hidden_size} that {sizes.num_attention_heads} heads do not divide"
    if len(set(config.get("layer_types") or ())) > 1:
        yield f"layer_types {config['layer_types']} differ, which is not supported"
    if config.get("sliding_window") and config.get("use_sliding_window") is not False and not config.get("layer_types"):
        fix = 'add "layer_types": ["sliding_attention"], or take it out'
        yield f"vLLM reads no sliding_window = {config['sliding_window']} without layer_types; {fix}"
