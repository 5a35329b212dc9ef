"""The DFlash drafter: a block of mask tokens after the newest token, all of whose tokens it proposes in one pass.

The maths are those of vLLM's qwen3_dflash.py. Context row r gives every layer a key and a value, made from the target's hidden
states at r alone. A start is drafted for with B = 1 + K rows: the token that the target has sampled, then K mask tokens. Mask j
has the position of draft token j and proposes it; what it proposes does not depend on the draft tokens before it. In a causal
block no mask sees those after it, so that drafts are the same whatever K is. The layers are Qwen3's for every target.

The residual stream of a target has columns that are 20 times as large as the others, and nothing norms them before `fc`. It
learns on columns that are divided by their root mean square, the `spread`; the weight that is saved and served has it folded in.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.attention import attend, run
from drafters.aux_layers import AUX_LAYERS, AuxDrafter, AuxShape, check_aux_layers, new_shape, unsupported
from drafters.base import ServingSpec, TargetSpec, TargetWeights, read_tensors
from drafters.block.first_weights import attend_to_newest, regression
from drafters.config import DFlashConfig
from drafters.target import other_values, read_sizes
from drafters.unroll import KEPT_STARTS, Attention, DraftLayer, in_chunks

SUPPORTED: dict[str, object] = {
    "hidden_act": "silu",
    "logit_scale": 1,
    "is_neox_style": True,
    "quantization_config": None,
}
"""Fields that vLLM reads of a drafter's config.json, with the only value that this drafter implements."""

IN_DFLASH_CONFIG: dict[str, object] = {"use_swa": False, "attention_sink_bias": False, "attention_value_scale": 1}
"""The same, of fields of dflash_config."""

UNUSED = ("t2d", "embed_tokens.weight")
"""Tensors of a checkpoint that are not read: the target's embedding is used, at the newest policy version."""

LAYER_IDS, MASK_IDS = ("target_layer_ids", "dspark_target_layer_ids"), ("mask_token_id", "dspark_noise_token_id")
"""Names of the fields with the layers that are read, numbered from 0, and with the mask token."""

SMALLEST_SPREAD = 1e-3
"""Columns that are nearly zero are left so."""


@dataclass(frozen=True)
class DFlashShape(AuxShape):
    """Shape of a DFlash drafter. In `sizes`, layers, attention, MLP width, RoPE and positions are the drafter's own."""

    mask_token_id: int
    causal: bool = True
    has_head: bool = True  # otherwise the target's, over all tokens
    from_anchor: bool = False  # the row of the newest token proposes the first draft token; DSpark's alone


class DFlashDrafter(AuxDrafter):
    """DFlash with a trainable head, or with the target's."""

    shape: DFlashShape
    spread: Tensor

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        self.serving = ServingSpec("dflash", shape.aux_layers)
        size, eps, bias = shape.sizes.hidden_size, shape.sizes.rms_norm_eps, shape.sizes.attention_bias
        self.fc = nn.Linear(len(shape.aux_layers) * size, size, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(size, eps) for _ in range(2))
        attentions = (Attention(shape.sizes, size, bias, norm=nn.RMSNorm) for _ in range(shape.sizes.num_layers))
        self.layers = nn.ModuleList(map(DraftLayer, attentions))
        self.register_buffer("spread", torch.ones(self.fc.in_features))
        self.add_head(shape.has_head)
        self.never_drafted, self.drafts_follow_length = (shape.mask_token_id,), not shape.causal

    @staticmethod
    def shape_of(config: DFlashConfig, target: TargetSpec) -> DFlashShape:
        if config.type == "dflash" and config.markov_rank:
            raise ValueError(
                'drafter.model.markov_rank: DFlash has no Markov head; leave it out, or set type = "dspark"'
            )
        mask = target.unused_token_id if config.mask_token_id is None else config.mask_token_id
        if mask is None:
            raise ValueError(
                "drafter.model.mask_token_id: every token of the policy's vocabulary may occur in text; set the id of one that "
                "its text never has, such as a special token of another use"
            )
        if mask >= target.vocab_size or mask in target.eos_token_ids:
            raise ValueError(
                f"drafter.model.mask_token_id: {mask} is no token below {target.vocab_size} that text never has; set another"
            )
        return DFlashShape(**vars(new_shape(config, replace(target, sliding_window=None))), mask_token_id=mask)

    @staticmethod
    def read(
        folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
    ) -> tuple[DFlashShape, dict[str, Tensor]]:
        config, sizes = read_sizes(folder, target, lambda config, sizes: problems_of(config, sizes, Path(folder)))
        depth = config.get("block_size", 0) - 1 if config.get("block_size") else depth_if_unstated
        if depth is None:
            fix = 'add "block_size": 1 + K'
            raise ValueError(f"{folder}/config.json does not say how many draft positions were trained; {fix}")
        own = config.get("dflash_config") or {}
        tensors = {name: tensor for name, tensor in read_tensors(folder).items() if name not in UNUSED}
        layers = config.get(AUX_LAYERS) or [layer + 1 for layer in _stated(config, LAYER_IDS) or ()] or None
        causal = config.get("is_causal")
        shape = DFlashShape(
            sizes=replace(sizes, sliding_window=None),
            trained_depth=depth,
            draft_vocab_size=config.get("draft_vocab_size") or sizes.vocab_size,
            aux_layers=check_aux_layers(layers, target, f"{folder}/config.json"),
            mask_token_id=_stated(config, MASK_IDS),
            causal=bool(own.get("causal", False) if causal is None else causal),
            has_head="lm_head.weight" in tensors,
        )
        return shape, {"spread": torch.ones(len(shape.aux_layers) * sizes.hidden_size), **tensors}

    @staticmethod
    def to_config(shape: DFlashShape) -> dict[str, object]:
        sizes = shape.sizes
        return {
            "architectures": ["DFlashDraftModel"],
            **sizes.layer_config(),
            "model_type": "qwen3",
            "attention_bias": sizes.attention_bias,
            "draft_vocab_size": shape.draft_vocab_size,
            "target_hidden_size": sizes.hidden_size,
            "block_size": 1 + shape.trained_depth,
            "dflash_config": {
                "mask_token_id": shape.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in shape.aux_layers],  # of the layer whose output is read
                "causal": shape.causal,
            },
        }

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        depth, first = len(alignment.supervised), 0 if self.shape.from_anchor else 1
        rows, dtype = alignment.context_rows, self.fc.weight.dtype
        context = self.hidden_norm(self.fc(batch.aux_hidden[rows].to(dtype) / self.spread))
        ids = torch.full((len(alignment.start_rows), first + depth), self.shape.mask_token_id, device=rows.device)
        ids[:, 0] = batch.token_ids[alignment.input_rows(0)]
        hidden = target.embedding.detach()[ids].to(dtype)  # [S, B, H]
        positions = batch.positions[alignment.start_rows][:, None] + 1 + torch.arange(first + depth, device=rows.device)
        starts, from_first = slice(0, len(ids)), torch.zeros_like(alignment.starts_in_context)
        for layer in [cast(DraftLayer, layer) for layer in self.layers]:
            read = run(len(rows) <= 4 * KEPT_STARTS, layer.self_attn.keys_and_values, context, batch.positions[rows])
            queries, keys, values = in_chunks(_project, hidden, [positions], layer)
            attended = attend(queries, read, (keys, values), alignment, starts, from_first, self.shape.causal)
            (hidden,) = in_chunks(_finish, hidden, [attended], layer)
        hidden = self.norm(hidden)
        head = self.lm_head.weight if self.has_own_head else target.head
        return [hidden[:, row] for row in range(first, first + depth)], head

    @torch.no_grad()
    def start_training(self, batch: DraftBatch, target: TargetWeights, is_new: bool) -> None:
        spread = batch.aux_hidden[batch.feature_mask].float().square().mean(0).sqrt().clamp(min=SMALLEST_SPREAD)
        spread = spread.to(self.spread)
        if not is_new:
            self.fc.weight.mul_(spread / self.spread)
        self.spread.copy_(spread)
        if is_new:
            self._start_near(batch, target)

    def _start_near(self, batch: DraftBatch, target: TargetWeights) -> None:
        """Set the first weights of a new drafter, see first_weights.py."""
        first, size, aux = cast(DraftLayer, self.layers[0]), self.shape.sizes.hidden_size, batch.aux_hidden
        states = aux.to(self.fc.weight.dtype) / self.spread
        weight = regression(states[:, -size:], batch)
        if weight is None:
            return
        self.fc.weight[:, -size:] = weight.to(self.fc.weight)
        context = self.hidden_norm(self.fc(states[batch.feature_mask]))
        mask = target.embedding[self.shape.mask_token_id].to(context.dtype)
        attend_to_newest(first.self_attn, context, first.input_layernorm(mask))
        self.norm.weight.fill_(float(batch.final_hidden[batch.feature_mask].float().square().mean().sqrt()))

    def state_for_serving(self) -> dict[str, Tensor]:
        state = {name: tensor for name, tensor in self.state_dict().items() if name != "spread"}
        return state | {"fc.weight": self.fc.weight.detach() / self.spread}

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        self.spread.fill_(1.0)


def _project(layer: DraftLayer, _: slice, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values [S, B, heads, D] of the rows [S, B, H] of some starts' blocks, at positions [S, B]."""
    x, at = layer.input_layernorm(hidden).flatten(0, 1), positions.flatten()
    rows = layer.self_attn.queries(x, at), *layer.self_attn.keys_and_values(x, at)
    return tuple(tensor.unflatten(0, positions.shape) for tensor in rows)


def _finish(layer: DraftLayer, _: slice, hidden: Tensor, attended: Tensor) -> tuple[Tensor]:
    """Return the output [S, B, H] of a layer."""
    rows = hidden.flatten(0, 1)
    return (layer.finish(attended.flatten(0, 1), rows, rows).view_as(hidden),)


def _stated(config: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of these fields that dflash_config or, after it, the configuration itself has; None if none is there."""
    own = config.get("dflash_config") or {}
    return next((fields[name] for fields in (own, config) for name in names if fields.get(name) is not None), None)


def problems_of(config: dict[str, Any], sizes: TargetSpec, folder: Path) -> Iterator[str]:
    """Yield each reason why this drafter would not compute what an engine computes from the same checkpoint."""
    fields = other_values(config, SUPPORTED) + other_values(config.get("dflash_config") or {}, IN_DFLASH_CONFIG)
    yield from unsupported("a DFlash", fields, sizes)
    if "sliding_attention" in (config.get("layer_types") or ()):
        yield "it has layers with sliding attention, which cotrain does not train"
    if _stated(config, MASK_IDS) is None:
        yield "it has no mask_token_id"
    if (folder / "mask_embedding.pt").exists():
        yield "it has a mask_embedding.pt, which vLLM cannot replace in a running engine"
