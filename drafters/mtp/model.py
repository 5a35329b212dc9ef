"""The MTP drafter: a head over the target's final hidden state, with the target's own embedding and output head.

The head joins the normed embedding of the next token and the normed hidden state into one vector, and runs a decoder
layer on it. The maths are those of vLLM's mimo_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py and glm4_moe_mtp.py. The target's head
reads the state after the final norm. In shapes, R counts packed rows, E experts, and H is the hidden size.

The checkpoint folder, which stock vLLM serves beside the target, holds the head's tensors under the names of its format, and
nothing of the target. The target's matrices are borrowed for each loss, never kept, so that a policy update refreshes them and
no gradient reaches them. vLLM reads the sizes of the head from the target's configuration, so a head of other sizes is refused.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.base import TRAINED_DEPTH, Drafter, Experts, ServingSpec, Shape, TargetSpec, TargetWeights, read_tensors
from drafters.config import MtpConfig
from drafters.files import read_config
from drafters.mtp.formats import TARGETS, HeadFormat, head_sizes
from drafters.unroll import MLP, Attention, DraftLayer, ZeroCentredRMSNorm, unroll

OF_TARGET = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "sliding_window",
)  # fmt: skip
"""Fields of a head that vLLM reads from the target's configuration."""


class SparseMLP(nn.Module):
    """Each row goes through its likeliest experts, weighted by the router, and through an expert that all rows share.

    The scores of experts are a softmax, and a gate weights the shared one (Qwen); or they are sigmoids, in float32 at least, to which
    a bias that no gradient changes is added for the choice alone (GLM, DeepSeek).
    """

    def __init__(self, hidden_size: int, experts: Experts, scores: str) -> None:
        """scores: "softmax" or "sigmoid"."""
        super().__init__()
        self.routing, self.softmax = experts, scores == "softmax"
        self.gate = nn.Linear(hidden_size, experts.number, bias=False)
        self.experts = nn.ModuleList([MLP(hidden_size, experts.size) for _ in range(experts.number)])
        shared = MLP(hidden_size, experts.shared_size)
        if self.softmax:
            self.shared_expert, self.shared_expert_gate = shared, nn.Linear(hidden_size, 1, bias=False)
        else:
            self.shared_experts = shared
            self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts.number))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [R, H] for x [R, H]."""
        if self.softmax:
            scores = choosing = self.gate(x).softmax(-1)
            output = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        else:
            scores = self.gate(x).to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
            choosing, output = scores + self.gate.e_score_correction_bias, self.shared_experts(x)
        chosen = choosing.topk(self.routing.per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.routing.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # as transformers does where all scores are 0
        weights = (self.routing.scale * weights).to(x.dtype)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                output = output.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
        return output


class MtpHead(DraftLayer):
    """The head of any format. Its modules have other names in checkpoints: see `HeadFormat.path`."""

    def __init__(self, head_format: HeadFormat, sizes: TargetSpec) -> None:
        size, eps, gated = sizes.hidden_size, sizes.rms_norm_eps, head_format.gated
        norm = ZeroCentredRMSNorm if gated else nn.RMSNorm
        attention = Attention(sizes, size, gated=gated, norm=norm if gated or sizes.qk_norm else None)
        sparse = SparseMLP(size, sizes.experts, head_format.experts) if sizes.experts else None
        super().__init__(attention, norm, sparse)
        self.format = head_format
        self.embedding_norm, self.hidden_norm, self.output_norm = (norm(size, eps) for _ in range(3))
        self.joining = nn.Linear(2 * size, size, bias=False)

    def join(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Join embeddings and hidden states [R, H] into the residual [R, H] that enters the decoder layer."""
        if self.format.zero_first:
            embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
        normed = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        return self.joining(torch.cat(normed[::-1] if self.format.hidden_first else normed, dim=-1))

    def attention_input(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.join(embeddings, hidden, positions)
        return self.input_layernorm(residual), residual


class MtpDrafter(Drafter):
    """One MTP head, trained and served over several draft positions, with the target's whole vocabulary."""

    head: MtpHead

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.format = TARGETS[shape.sizes.model_type].behind(shape.sizes.num_layers)
        self.serving = ServingSpec("mtp", target_overrides=tuple(self.format.target_overrides.items()))
        # Not a submodule for torch: the modules of the head are registered only under their names in a checkpoint.
        object.__setattr__(self, "head", MtpHead(self.format, shape.sizes))
        for name in (*self.format.names, *self.head._modules):  # the joining matrix gets its random numbers first
            *path, last = self.format.path(name).split(".")
            parent: nn.Module = self
            for step in path:
                if step not in parent._modules:
                    parent.add_module(step, nn.Module())
                parent = parent.get_submodule(step)
            parent.add_module(last, self.head.get_submodule(name))

    @staticmethod
    def shape_of(config: MtpConfig, target: TargetSpec) -> Shape:
        return Shape(head_sizes(target), config.trained_depth)

    @staticmethod
    def read(folder: str | Path, target: TargetSpec, depth_if_unstated: int | None) -> tuple[Shape, dict[str, Tensor]]:
        config = read_config(folder)
        sizes = head_sizes(target)
        wanted, counted_by = TARGETS[target.model_type].architecture, TARGETS[target.model_type].counted_by
        if (num_heads := config.get(counted_by) or 1) != 1:
            raise ValueError(
                f"{folder} has {num_heads} MTP heads ({counted_by}), one for each draft position; vLLM runs the first "
                "again for every position, so only a single head is trained and served"
            )
        if config["architectures"][0] != wanted:
            raise ValueError(
                f"{folder} is an MTP head of format {config['architectures'][0]}; a target of model_type "
                f"{target.model_type} is served with one of format {wanted}"
            )
        stated = {name: value for name, value in config.items() if value is not None}
        theirs = TargetSpec.from_config({"max_position_embeddings": target.max_position_embeddings} | stated, folder)
        theirs.check_made_for(target, OF_TARGET, folder)
        shape = Shape(
            sizes=replace(sizes, max_position_embeddings=theirs.max_position_embeddings),
            trained_depth=config.get(TRAINED_DEPTH) or depth_if_unstated or 1,
        )
        return shape, read_tensors(folder)

    @staticmethod
    def to_config(shape: Shape) -> dict[str, object]:
        sizes, head_format = shape.sizes, TARGETS[shape.sizes.model_type]
        return {
            "architectures": [head_format.architecture],
            "model_type": head_format.model_type,
            head_format.counted_by: 1,
            TRAINED_DEPTH: shape.trained_depth,
            **sizes.layer_config(),
            "num_experts": sizes.experts.number if sizes.experts else 0,
        }

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        hidden = unroll(
            lambda final_hidden: final_hidden, [self.head], self.head.output_norm, batch.final_hidden, batch, alignment,
            target.embedding, recycles_normed=self.format.recycles_normed,
        )  # fmt: skip
        return hidden, target.head.detach().to(self.head.joining.weight.dtype)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Let the target's hidden state pass through to its head: the joined vector is the normed hidden state at first."""
        super().initialise(generator)
        for bias in self.buffers():  # of SparseMLP
            bias.zero_()
        halves = self.head.joining.weight.zero_().chunk(2, dim=1)
        halves[0 if self.format.hidden_first else 1].fill_diagonal_(1.0)
