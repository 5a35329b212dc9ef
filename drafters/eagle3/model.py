"""The EAGLE-3 drafter: fc over aux hidden states, one Llama decoder layer, final norm, head over a draft vocabulary.

Tensor names are those of its checkpoint. The target's embedding and head are borrowed for each loss, never kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.base import Drafter, ServingSpec, TargetSpec, TargetWeights
from drafters.config import Eagle3Config
from drafters.eagle3.checkpoint import Eagle3Shape, check_aux_layers, read_checkpoint, to_config
from drafters.unroll import MLP, Attention, DraftLayer, unroll


class DecoderLayer(DraftLayer):
    """The layer of vLLM's llama_eagle3.py: attention reads the normed embedding and hidden state side by side."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        size, eps = shape.sizes.hidden_size, shape.sizes.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(shape.sizes, input_size=2 * size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = MLP(size, shape.sizes.intermediate_size)
        self.norm_before_residual = shape.norm_before_residual

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return x, normed if self.norm_before_residual else hidden


class Eagle3Drafter(Drafter):
    """EAGLE-3 with a trainable head. Until `choose_vocabulary` the draft vocabulary is the first V_draft tokens."""

    shape: Eagle3Shape
    d2t: Tensor
    t2d: Tensor
    read = staticmethod(read_checkpoint)
    to_config = staticmethod(to_config)

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        size, eps, num_layers = shape.sizes.hidden_size, shape.sizes.rms_norm_eps, len(shape.aux_layers)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(size, eps) for _ in range(num_layers)])
        self.fc = nn.Linear(num_layers * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        # vLLM has no map to load when the vocabularies are the same.
        self.has_map = shape.draft_vocab_size < shape.sizes.vocab_size
        if self.has_map:
            d2t, t2d = to_maps(torch.arange(shape.draft_vocab_size), shape.sizes.vocab_size)
            self.register_buffer("d2t", d2t)
            self.register_buffer("t2d", t2d)

    @staticmethod
    def shape_of(config: Eagle3Config, target: TargetSpec) -> Eagle3Shape:
        if config.draft_vocab_size > target.vocab_size:
            raise ValueError(
                f"drafter.model.draft_vocab_size: {config.draft_vocab_size} is above the target's vocabulary of "
                f"{target.vocab_size} tokens; lower it"
            )
        return Eagle3Shape(
            sizes=replace(target, partial_rotary_factor=1.0),
            trained_depth=config.trained_depth,
            draft_vocab_size=config.draft_vocab_size,
            aux_layers=check_aux_layers(config.aux_layers, target, "drafter.model.aux_layers"),
            fc_norm=True,
            norm_before_residual=False,
        )

    @property
    def serving(self) -> ServingSpec:
        return ServingSpec("eagle3", self.shape.aux_layers)

    @property
    def draft_to_target(self) -> Tensor:
        return to_tokens(self.d2t) if self.has_map else super().draft_to_target

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """First hidden state [R, H] of the drafter, from those of the A aux layers [R, A*H]."""
        if self.shape.fc_norm:
            chunks = aux_hidden.chunk(len(self.fc_norm), dim=-1)
            aux_hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux_hidden)

    def check_tensors(self, tensors: dict[str, Tensor], source: str | Path) -> None:
        super().check_tensors(tensors, source)
        if self.has_map and not torch.equal(tensors["t2d"].nonzero().squeeze(1), to_tokens(tensors["d2t"])):
            raise ValueError(f"{source}: d2t and t2d do not name the same ascending token ids")

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        layer = cast(DecoderLayer, self.layers[0])
        hidden = unroll(
            self.fuse, layer, self.norm, batch.aux_hidden, batch, alignment, target.embedding, recycles_normed=False
        )
        return hidden, self.lm_head.weight

    @torch.no_grad()
    def choose_vocabulary(self, token_counts: Tensor, target: TargetWeights) -> float:
        tokens = choose_tokens(token_counts, self.shape.draft_vocab_size, self.shape.sizes.eos_token_ids)
        if self.has_map:
            self.d2t, self.t2d = (m.to(self.d2t.device) for m in to_maps(tokens, self.shape.sizes.vocab_size))
        self.lm_head.weight.copy_(target.head[tokens.to(target.head.device)])
        total = token_counts.sum()
        return float(token_counts[tokens].sum() / total) if total > 0 else 1.0

    def state_for_serving(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if name != "t2d"}

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """The highest aux state passes through fc, behind a norm that keeps its outliers from drowning the rest.

        The rows of the head come from the target later on.
        """
        super().initialise(generator)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.shape.sizes.hidden_size :].fill_diagonal_(1.0)
        if self.has_map:
            self.d2t.zero_()
            self.t2d.zero_()[: self.shape.draft_vocab_size] = True


def choose_tokens(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Choose the target ids [size] of the draft vocabulary, ascending: `always`, then the most frequent of counts [V].

    Ties, and rows left over once all counted tokens are in, go to the lowest token ids.
    size is at most V. Raises ValueError when it leaves no room for `always`.
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64, device=counts.device)
    if len(kept) > size:
        raise ValueError(f"draft_vocab_size {size} is below the {len(kept)} tokens that must be in it")
    rank = counts.to(torch.float64, copy=True)
    rank[kept] = torch.inf
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def to_maps(draft_to_target: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (d2t [V_draft] int64, t2d [V] bool) from ascending target ids [V_draft].

    target id = draft id + d2t[draft id]; t2d says of each target id whether it is in the draft vocabulary.
    """
    d2t = draft_to_target - torch.arange(len(draft_to_target), device=draft_to_target.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=draft_to_target.device)
    t2d[draft_to_target] = True
    return d2t, t2d


def to_tokens(d2t: Tensor) -> Tensor:
    """Return target ids [V_draft] from offsets [V_draft]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
