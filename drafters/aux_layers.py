"""What EAGLE-3 and the block drafters share: they read hidden states of some target layers, and propose tokens of a draft vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Drafter, Shape, TargetSpec, TargetWeights
from drafters.config import AuxConfig
from drafters.unroll import BY_LENGTH, inverse_frequencies

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Field of config.json with which vLLM numbers them as cotrain does: id k is the state after k layers."""


@dataclass(frozen=True)
class AuxShape(Shape):
    """Shape of a drafter that reads A aux layers."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # ascending; id k = Hugging Face hidden_states[k]


def new_shape(config: AuxConfig, target: TargetSpec) -> AuxShape:
    """Return what the shape of a new drafter has of its configuration.

    Its layers have no biases, and a rotation that can be trained, which need not be the target's. Raises ValueError naming the field
    that does not fit.
    """
    draft_vocab_size = config.draft_vocab_size or min(8192, target.vocab_size)
    if draft_vocab_size > target.vocab_size:
        more = f"{draft_vocab_size} is above the target's vocabulary of {target.vocab_size} tokens"
        raise ValueError(f"drafter.model.draft_vocab_size: {more}; lower it")
    rope = target.rope_parameters
    if rope["rope_type"] in BY_LENGTH:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    sizes = replace(target, num_layers=config.num_layers, rope_parameters=rope, attention_bias=False, mlp_bias=False)
    inverse_frequencies(sizes)
    aux_layers = check_aux_layers(config.aux_layers, target, "drafter.model.aux_layers")
    return AuxShape(sizes, config.trained_depth, draft_vocab_size, aux_layers)


def check_aux_layers(layers: Any, target: TargetSpec, field: str) -> tuple[int, ...]:
    """Return the ids of the aux layers; None stands for every engine's default (2, N//2, N-3) in a target of N layers.

    Raises ValueError naming `field` unless they are strictly ascending and inside the target, which the default is not
    in small targets.
    """
    last = target.num_layers - 1
    name = "the default aux layers" if layers is None else "aux layers"
    layers = (2, target.num_layers // 2, last - 2) if layers is None else tuple(layers)
    # vLLM sorts the ids and drops duplicates: fc would read fewer columns, or in another order, than in training.
    if list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > last:
        raise ValueError(
            f"{field}: {name} {list(layers)} are not ascending ids between 1 and {last}, the states between the target's "
            f"{target.num_layers} layers; set such ids"
        )
    return layers


def unsupported(variant: str, fields: Sequence[str], sizes: TargetSpec) -> Iterator[str]:
    """Yield why a drafter would not compute what an engine does: fields with values that are not implemented, and its rotation."""
    for field in fields:
        yield f"this is {variant} variant with {field}, which is not supported"
    try:
        inverse_frequencies(sizes)
    except ValueError as error:
        yield str(error)


class AuxDrafter(Drafter):
    """A drafter that reads the states of aux layers through `fc`. Until `choose_vocabulary` it can propose the first V_draft tokens."""

    shape: AuxShape
    fc: nn.Linear  # [A*H] to [H]
    d2t: Tensor
    """[V_draft] int64: target id = draft id + d2t[draft id], ascending."""
    never_drafted: tuple[int, ...] = ()
    """The token ids that no text has."""

    def add_head(self, own: bool = True) -> None:
        """Add the head, unless it is the target's, and the map to the target's vocabulary; a subclass calls it after its layers."""
        sizes, self.has_own_head = self.shape.sizes, own
        if own:
            self.lm_head = nn.Linear(sizes.hidden_size, self.shape.draft_vocab_size, bias=False)
        # vLLM has no map to load when the vocabularies are the same.
        self.has_map = self.shape.draft_vocab_size < sizes.vocab_size
        self._set_map(torch.arange(self.shape.draft_vocab_size))

    def _set_map(self, tokens: Tensor) -> None:
        if self.has_map:
            tokens = tokens.to(self.fc.weight.device)
            self.register_buffer("d2t", tokens - torch.arange(len(tokens), device=tokens.device))

    @property
    def draft_to_target(self) -> Tensor:
        if not self.has_map:
            return super().draft_to_target
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def choose_vocabulary(self, token_counts: Tensor, target: TargetWeights) -> float:
        size, always = self.shape.draft_vocab_size, self.shape.sizes.eos_token_ids
        tokens = choose_tokens(token_counts, size, always, self.never_drafted)
        self._set_map(tokens)
        if self.has_own_head:
            self.lm_head.weight.copy_(target.head[tokens.to(target.head.device)])
        total = token_counts.sum()
        return float(token_counts[tokens].sum() / total) if total > 0 else 1.0

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Let fc pass the highest aux layer's state through. `choose_vocabulary` later copies the rows of the head from the target."""
        super().initialise(generator)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.shape.sizes.hidden_size :].fill_diagonal_(1.0)
        self._set_map(torch.arange(self.shape.draft_vocab_size))


def choose_tokens(counts: Tensor, size: int, always: Sequence[int] = (), never: Sequence[int] = ()) -> Tensor:
    """Choose the target ids [size] of the draft vocabulary, ascending: `always`, then the most frequent of counts [V].

    Ties, and places left over once all counted tokens are in, go to the lowest token ids, and to those in `never` last.
    size is at most V. Raises ValueError when it leaves no room for `always`.
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64, device=counts.device)
    if len(kept) > size:
        raise ValueError(f"draft_vocab_size {size} is below the {len(kept)} tokens that must be in it")
    rank = counts.to(torch.float64, copy=True)
    rank[list(never)] = -1
    rank[kept] = torch.inf
    return rank.argsort(descending=True, stable=True)[:size].sort().values
