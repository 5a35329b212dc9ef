"""The MTP drafter: a head over the target's final hidden state, with the target's own embedding and output head.

Tensor names are those of its checkpoint. The target's matrices are borrowed for each loss, never kept, so that a policy
update refreshes them and no gradient reaches them.
"""

from typing import cast

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.attention import ZeroCentredRMSNorm
from drafters.base import Drafter, DraftLoss, Drafts, SamplingParams, ServingSpec, Shape, TargetSpec, TargetWeights
from drafters.config import MtpConfig, ObjectiveConfig
from drafters.losses import drafter_loss
from drafters.mtp.checkpoint import read_checkpoint, to_config
from drafters.mtp.formats import TARGETS, head_sizes
from drafters.mtp.layer import MtpHead
from drafters.unroll import unroll


class MtpDrafter(Drafter):
    """One MTP head, trained and served over several draft positions, with the target's whole vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.format = TARGETS[shape.sizes.model_type]
        # Modules nested as the format's prefix says, so that parameters have the checkpoint's names.
        *path, last = self.format.prefix.strip(".").split(".")
        parent: nn.Module = self
        for name in path:
            parent.add_module(name, nn.Module())
            parent = cast(nn.Module, parent.get_submodule(name))
        parent.add_module(last, self.format.module(shape.sizes))

    read = staticmethod(read_checkpoint)

    @classmethod
    def shape_of(cls, config: MtpConfig, target: TargetSpec) -> Shape:
        return Shape(head_sizes(target), config.trained_depth)

    @property
    def head(self) -> MtpHead:
        """The trained part."""
        return cast(MtpHead, self.get_submodule(self.format.prefix.strip(".")))

    @property
    def serving(self) -> ServingSpec:
        return ServingSpec("mtp", target_overrides=self.format.target_overrides)

    @property
    def draft_to_target(self) -> Tensor:
        return torch.arange(self.shape.sizes.vocab_size, device=self.head.joining.weight.device)

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> Drafts:
        head = self.head
        hidden = unroll(
            lambda final_hidden: final_hidden, head, head.output_norm, batch.final_hidden, batch, alignment,
            target.embedding, recycles_normed=True,
        )  # fmt: skip
        borrowed = target.head.detach().to(head.joining.weight.dtype)
        return Drafts(hidden, borrowed, self.draft_to_target, self.shape.sizes.eos_token_ids)

    def loss(
        self, batch: DraftBatch, target: TargetWeights, sampling: SamplingParams, objective: ObjectiveConfig
    ) -> DraftLoss:
        return drafter_loss(self, batch, target, sampling, objective)

    def serving_config(self) -> dict[str, object]:
        return to_config(self.shape)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal(0, 0.02) matrices, no biases, unit gains; the target's hidden state passes through to its head."""
        head = self.head
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.RMSNorm | ZeroCentredRMSNorm):
                module.weight.fill_(0.0 if isinstance(module, ZeroCentredRMSNorm) else 1.0)
        head.joining.weight.zero_()
        head.joining.weight[:, head.hidden_columns].fill_diagonal_(1.0)
