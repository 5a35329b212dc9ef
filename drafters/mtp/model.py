"""The MTP drafter: a head over the target's final hidden state, with the target's own embedding and output head.

Tensor names are those of its checkpoint. The target's matrices are borrowed for each loss, never kept, so that a policy
update refreshes them and no gradient reaches them.
"""

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.base import Drafter, ServingSpec, Shape, TargetSpec, TargetWeights
from drafters.config import MtpConfig
from drafters.mtp.checkpoint import read_checkpoint, to_config
from drafters.mtp.formats import TARGETS, head_sizes
from drafters.mtp.layer import MtpHead
from drafters.unroll import unroll


class MtpDrafter(Drafter):
    """One MTP head, trained and served over several draft positions, with the target's whole vocabulary."""

    head: MtpHead
    read = staticmethod(read_checkpoint)
    to_config = staticmethod(to_config)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.format = TARGETS[shape.sizes.model_type]
        # Behind torch's back: the modules of the head are registered under the checkpoint's names alone.
        object.__setattr__(self, "head", MtpHead(self.format, shape.sizes))
        for name, module in self.head.named_children():
            *path, last = self.format.path(name).split(".")
            parent: nn.Module = self
            for step in path:
                if step not in parent._modules:
                    parent.add_module(step, nn.Module())
                parent = parent.get_submodule(step)
            parent.add_module(last, module)

    @classmethod
    def shape_of(cls, config: MtpConfig, target: TargetSpec) -> Shape:
        return Shape(head_sizes(target), config.trained_depth)

    @property
    def serving(self) -> ServingSpec:
        return ServingSpec("mtp", target_overrides=self.format.target_overrides)

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        hidden = unroll(
            lambda final_hidden: final_hidden, self.head, self.head.output_norm, batch.final_hidden, batch, alignment,
            target.embedding, recycles_normed=True,
        )  # fmt: skip
        return hidden, target.head.detach().to(self.head.joining.weight.dtype)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """The target's hidden state passes through to its head."""
        super().initialise(generator)
        self.head.pass_hidden_state()
