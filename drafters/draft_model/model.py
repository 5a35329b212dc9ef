"""The small draft model: a plain causal language model of few layers with its own embedding, norm and head.

It reads only tokens; the target's hidden states teach it through the loss. At draft position k of start t it has read the
rollout's tokens up to x_{t+1+k}. The true tokens are fed at every position, so one causal pass over a rollout holds all draft
positions of all starts: position k of start t is the state of row t + 1 + k. In the engine, the draft model reads the same
tokens, those of the prompt included, whether or not the target's features were tapped there.

It is transformers' model of its family, and its folder is a stock Hugging Face causal language model. Its first weights are
layers of the policy, whose tensors have the same names in the policy's folder except for the layer numbers.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafters.alignment import Alignment, DraftBatch
from drafters.base import (
    TRAINED_DEPTH,
    Drafter,
    ServingSpec,
    Shape,
    TargetSpec,
    TargetWeights,
    model_tensors,
    read_tensors,
)
from drafters.config import DraftModelConfig
from drafters.target import read_sizes, served_otherwise

HEAD = "lm_head.weight"

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architecture of each family that can be trained and served, by model_type."""


class DraftModel(Drafter):
    """A language model over the target's whole vocabulary, whose head is tied with its embedding as the target's is."""

    def __init__(self, shape: Shape) -> None:
        # transformers takes a second to import, and no other drafter needs it.
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__(shape)
        self.serving = ServingSpec("draft_model")
        config = AutoConfig.for_model(**self.to_config(shape))
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model = whole.model
        with torch.device("cpu"):  # No checkpoint holds the rotary frequencies, so they need values here.
            self.model.rotary_emb = type(self.model.rotary_emb)(config)
        if not shape.sizes.tie_word_embeddings:
            self.lm_head = whole.lm_head

    @staticmethod
    def shape_of(config: DraftModelConfig, target: TargetSpec) -> Shape:
        if problems := _unsupported(target):
            raise ValueError(f'drafter.model.type: {problems[0]}; use type = "eagle3"')
        if config.num_layers > target.num_layers:
            more = f"{config.num_layers} layers cannot be cut from the target's {target.num_layers}"
            raise ValueError(f"drafter.model.num_layers: {more}; lower it")
        return Shape(replace(target, num_layers=config.num_layers), config.trained_depth)

    @staticmethod
    def read(folder: str | Path, target: TargetSpec, depth_if_unstated: int | None) -> tuple[Shape, dict[str, Tensor]]:
        config, sizes = read_sizes(folder, target, lambda _, sizes: _unsupported(sizes))
        if fields := served_otherwise(config):
            other = "vLLM would serve another model than is trained"
            raise ValueError(f"{folder}/config.json has {', '.join(fields)}: {other}")
        sizes.check_made_for(target, ("sliding_window",), folder)  # vLLM gives it the target's
        depth = config.get(TRAINED_DEPTH) or depth_if_unstated or 1
        return Shape(sizes, depth), _own_tensors(read_tensors(folder), sizes)

    @staticmethod
    def to_config(shape: Shape) -> dict[str, object]:
        sizes = shape.sizes
        return {
            **sizes.layer_config(),
            "architectures": [FAMILIES[sizes.model_type]],
            "model_type": sizes.model_type,
            "tie_word_embeddings": sizes.tie_word_embeddings,
            "attention_bias": sizes.attention_bias,
            "mlp_bias": sizes.mlp_bias,
            TRAINED_DEPTH: shape.trained_depth,
        }

    def start_from(self, policy: str | Path) -> None:
        self.load_tensors(cut(policy, self.shape), f"what is cut from {policy}")

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        # transformers sees where positions restart, and keeps attention within each rollout.
        output = self.model(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        states = output.last_hidden_state[0]
        head = self.model.embed_tokens if self.shape.sizes.tie_word_embeddings else self.lm_head
        return [states[alignment.input_rows(k)] for k in range(len(alignment.supervised))], head.weight


def _unsupported(sizes: TargetSpec) -> list[str]:
    """Return the reason why a model of these sizes cannot be trained as a draft model; nothing when it can."""
    if sizes.model_type not in FAMILIES:
        return [f"a draft model of model_type {sizes.model_type} cannot be trained ({', '.join(FAMILIES)} can)"]
    rope = sizes.rope_parameters
    if rope["rope_type"] != "default" or "partial_rotary_factor" in rope:
        return [f'only rope_type "default" over whole heads can be trained, not {rope["rope_type"]!r}']
    return []


def _own_tensors(tensors: dict[str, Tensor], sizes: TargetSpec) -> dict[str, Tensor]:
    """Leave out tensors that no model loads: the head of a tied model, and rotary frequencies of old checkpoints."""
    unused = ("rotary_emb.inv_freq", *([HEAD] if sizes.tie_word_embeddings else []))
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(unused)}


def cut(policy: str | Path, shape: Shape) -> dict[str, Tensor]:
    """Read the tensors of a draft model from a policy's folder: embedding, evenly spaced layers, final norm and head."""
    of_policy = TargetSpec.from_pretrained(policy).num_layers
    numbers = {layer: number for number, layer in enumerate(evenly_spaced(of_policy, shape.sizes.num_layers))}
    tensors = {}
    for name, tensor in model_tensors(Path(policy)):
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            tensors[name] = tensor
        elif int(layer[1]) in numbers:
            tensors[f"model.layers.{numbers[int(layer[1])]}.{layer[2]}"] = tensor
    return _own_tensors(tensors, shape.sizes)


def evenly_spaced(num_layers: int, num_chosen: int) -> list[int]:
    """Return the numbers of two or more evenly spaced layers, with the first and the last among them."""
    return [round(number * (num_layers - 1) / (num_chosen - 1)) for number in range(num_chosen)]
