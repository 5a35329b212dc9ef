"""The small draft model: a plain causal language model of few layers with its own embedding, norm and head.

It reads tokens only; the target's hidden states teach it through the loss. At draft position k of a start it has read the
rollout's tokens up to x_{t+1+k}, so that with the true tokens fed at every position one causal pass over a rollout holds all
draft positions of all starts: position k of start t is the state of row t + 1 + k. The engine reads the same, prompts without
features included, since it computes them itself. In shapes, N counts packed rows and H is the hidden size.
"""

from pathlib import Path
from typing import cast

from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch, every_row
from drafters.base import Drafter, ServingSpec, Shape, TargetSpec, TargetWeights
from drafters.draft_model.checkpoint import FAMILIES, cut, read_checkpoint, shape_of, to_config
from drafters.unroll import MLP, Attention, DraftLayer, run_layer


class DecoderLayer(DraftLayer):
    """A decoder layer of the target's family."""

    def __init__(self, sizes: TargetSpec) -> None:
        super().__init__()
        size, eps, family = sizes.hidden_size, sizes.rms_norm_eps, FAMILIES[sizes.model_type]
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(sizes, size, bias=family.bias, head_norms=family.head_norms)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = MLP(size, sizes.intermediate_size)


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, sizes: TargetSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(sizes) for _ in range(sizes.num_layers)])
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(self, batch: DraftBatch) -> Tensor:
        """[N, H], what the head reads at each row of the packed rollouts."""
        hidden, every = self.embed_tokens(batch.token_ids), every_row(batch)
        for layer in self.layers:
            hidden = run_layer(cast(DecoderLayer, layer), hidden, batch.positions, every)
        return self.norm(hidden)


class DraftModel(Drafter):
    """A language model over the target's whole vocabulary, whose head is tied with its embedding as the target's is."""

    shape_of = staticmethod(shape_of)
    read = staticmethod(read_checkpoint)
    to_config = staticmethod(to_config)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        sizes = shape.sizes
        self.model = Decoder(sizes)
        if not sizes.tie_word_embeddings:
            self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)

    def start_from(self, policy: str | Path) -> None:
        tensors = cut(policy, self.shape)
        self.check_tensors(tensors, f"what is cut from {policy}")
        self.load_state_dict(tensors)

    @property
    def serving(self) -> ServingSpec:
        return ServingSpec("draft_model")

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        states = self.model(batch)
        head = self.model.embed_tokens if self.shape.sizes.tie_word_embeddings else self.lm_head
        return [states[alignment.input_rows(k)] for k in range(len(alignment.supervised))], head.weight
