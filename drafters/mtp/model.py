"""The MTP drafter: a head over the target's final hidden state, with the target's own embedding and output head.

The head joins the normed embedding of the next token and the normed hidden state into one vector, and runs a decoder
layer on it. Maths are those of vLLM's mimo_mtp.py and qwen3_next_mtp.py. The state after the final norm is what the
target's head reads, and what is fed back. In shapes, R counts packed rows and H is the hidden size.

Tensor names are those of its checkpoint. The target's matrices are borrowed for each loss, never kept, so that a policy
update refreshes them and no gradient reaches them.
"""

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.attention import MLP, Attention, DraftLayer, ZeroCentredRMSNorm
from drafters.base import Drafter, Experts, ServingSpec, Shape, TargetSpec, TargetWeights
from drafters.config import MtpConfig
from drafters.mtp.checkpoint import read_checkpoint, to_config
from drafters.mtp.formats import TARGETS, HeadFormat, head_sizes
from drafters.unroll import unroll


class SparseMLP(nn.Module):
    """Each row goes through its likeliest experts, weighted by the router, and through one that all rows share."""

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.routing = experts
        self.gate = nn.Linear(hidden_size, experts.number, bias=False)
        self.experts = nn.ModuleList([MLP(hidden_size, experts.size) for _ in range(experts.number)])
        self.shared_expert = MLP(hidden_size, experts.shared_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] from [R, H]."""
        weights, chosen = self.gate(x).softmax(-1).topk(self.routing.per_token, dim=-1)
        if self.routing.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        output = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                output = output.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
        return output


class MtpHead(DraftLayer):
    """The head of any format. Its modules are called otherwise in checkpoints: see `HeadFormat.path`."""

    def __init__(self, head_format: HeadFormat, sizes: TargetSpec) -> None:
        super().__init__()
        size, eps, gated = sizes.hidden_size, sizes.rms_norm_eps, head_format.gated
        norm = ZeroCentredRMSNorm if gated else nn.RMSNorm
        self.hidden_first = head_format.hidden_first
        self.embedding_norm, self.hidden_norm = norm(size, eps), norm(size, eps)
        self.joining = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = norm(size, eps)
        self.self_attn = Attention(sizes, size, bias=not gated, gated=gated)
        self.post_attention_layernorm = norm(size, eps)
        self.mlp = SparseMLP(size, sizes.experts) if sizes.experts else MLP(size, sizes.intermediate_size)
        self.output_norm = norm(size, eps)

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Residual [R, H] that enters the decoder layer."""
        if self.hidden_first:
            embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
        normed = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        return self.joining(torch.cat(normed[::-1] if self.hidden_first else normed, dim=-1))

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.join(embeddings, hidden, positions)
        return self.input_layernorm(residual), residual


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
        """The target's hidden state passes through to its head: the joined vector is the normed hidden state."""
        super().initialise(generator)
        halves = self.head.joining.weight.zero_().chunk(2, dim=1)
        halves[0 if self.head.hidden_first else 1].fill_diagonal_(1.0)
