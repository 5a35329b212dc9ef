"""The EAGLE-3 drafter: fc over aux hidden states, one Llama decoder layer, final norm, head over a draft vocabulary.

Tensor names are those of its checkpoint. The target's embedding and head are borrowed for each loss, never kept.
"""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.base import Drafter, DraftLoss, Drafts, SamplingParams, ServingSpec, TargetSpec, TargetWeights
from drafters.config import Eagle3Config, ObjectiveConfig
from drafters.eagle3.checkpoint import check_aux_layers, read_checkpoint, to_config
from drafters.eagle3.layer import DecoderLayer, Eagle3Shape
from drafters.losses import drafter_loss
from drafters.unroll import unroll
from drafters.vocabulary import choose_tokens, coverage, to_maps, to_tokens


class Eagle3Drafter(Drafter):
    """EAGLE-3 with a trainable head. Until `choose_vocabulary` the draft vocabulary is the first V_draft tokens."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        size, eps, num_layers = shape.sizes.hidden_size, shape.sizes.rms_norm_eps, len(shape.aux_layers)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(size, eps=eps) for _ in range(num_layers)])
        self.fc = nn.Linear(num_layers * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        # vLLM has no map to load when the vocabularies are the same.
        self.has_map = shape.draft_vocab_size < shape.sizes.vocab_size
        if self.has_map:
            d2t, t2d = to_maps(torch.arange(shape.draft_vocab_size), shape.sizes.vocab_size)
            self.register_buffer("d2t", d2t)
            self.register_buffer("t2d", t2d)

    read = staticmethod(read_checkpoint)

    @classmethod
    def shape_of(cls, config: Eagle3Config, target: TargetSpec) -> Eagle3Shape:
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
        return (
            to_tokens(self.d2t)
            if self.has_map
            else torch.arange(len(self.lm_head.weight), device=self.fc.weight.device)
        )

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

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> Drafts:
        hidden = unroll(
            self.fuse,
            cast(DecoderLayer, self.layers[0]),
            self.norm,
            batch.aux_hidden,
            batch,
            alignment,
            target.embedding,
            recycles_normed=False,
        )
        return Drafts(hidden, self.lm_head.weight, self.draft_to_target, self.shape.sizes.eos_token_ids)

    def loss(
        self, batch: DraftBatch, target: TargetWeights, sampling: SamplingParams, objective: ObjectiveConfig
    ) -> DraftLoss:
        return drafter_loss(self, batch, target, sampling, objective)

    @torch.no_grad()
    def choose_vocabulary(self, token_counts: Tensor, target: TargetWeights) -> float:
        tokens = choose_tokens(token_counts, self.shape.draft_vocab_size, self.shape.sizes.eos_token_ids)
        if self.has_map:
            self.d2t, self.t2d = (m.to(self.d2t.device) for m in to_maps(tokens, self.shape.sizes.vocab_size))
        self.lm_head.weight.copy_(target.head[tokens.to(target.head.device)])
        return coverage(token_counts, tokens)

    def state_for_serving(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if name != "t2d"}

    def serving_config(self) -> dict[str, object]:
        return to_config(self.shape)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal(0, 0.02) matrices and unit norms, as Llama starts; the head's rows come from the target later on.

        fc passes the highest aux state through; its norm keeps that state's outliers from drowning the rest.
        """
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.shape.sizes.hidden_size :].fill_diagonal_(1.0)
        if self.has_map:
            self.d2t.zero_()
            self.t2d.zero_()[: self.shape.draft_vocab_size] = True
