"""Configuration of a drafter model. Imports no torch, so that --help stays fast."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt


class Section(BaseModel):
    """Base of every configuration section. It is frozen, refuses unknown fields, and shows attribute docstrings as help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # fields may be dictionaries, which have no hash


class AuxConfig(Section):
    """What drafters have that read hidden states of some target layers."""

    draft_vocab_size: PositiveInt | None = None
    """Number of tokens the drafter can propose, chosen by frequency in the first rollouts. At most the target's vocabulary.
    Default: 8192, or the target's vocabulary if that is smaller; a drafter that is loaded keeps its own."""
    num_layers: PositiveInt = 1
    """Number of decoder layers. Those after the first read the state of the one before alone."""
    aux_layers: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    """Target layers whose input residual stream is read, ascending (id k = Hugging Face hidden_states[k]).
    Default: 2, N//2, N-3 for a target of N layers."""
    trained_depth: PositiveInt = 3
    """Draft positions unrolled in training (training-time test). Serve no more draft tokens than this."""


class Eagle3Config(AuxConfig):
    """EAGLE-3: Llama-style layers over hidden states of some target layers."""

    type: Literal["eagle3"]
    """Kind of drafter."""


class DFlashConfig(AuxConfig):
    """DFlash: Qwen3 layers over hidden states of some target layers, which propose a whole block of tokens in one pass. DSpark adds a
    head of low rank through which a draft token knows the one before it, and an estimate of its acceptance; only vLLM's model runner
    V2 serves it."""

    type: Literal["dflash", "dspark"]
    """Kind of drafter."""
    num_layers: PositiveInt = 2
    """Number of decoder layers."""
    trained_depth: PositiveInt = 5
    """Draft positions trained, which is the longest block. Serve no more draft tokens than this."""
    mask_token_id: NonNegativeInt | None = None
    """Token that stands for a draft token in the block; the policy's text must not have it. Default: the highest id that stands for
    no token, or a special token that neither the tokenizer's settings nor its chat template name."""
    markov_rank: PositiveInt | None = None
    """Rank of the bias that the token before gives the logits of a draft token, for dspark alone. Default: 64 there."""


class MtpConfig(Section):
    """MTP: one decoder layer over the target's final hidden state; embedding and head are always the target's.
    It starts as the policy's own MTP head if the policy's checkpoint has one, and from random weights otherwise."""

    type: Literal["mtp"]
    """Kind of drafter."""
    trained_depth: PositiveInt = 3
    """Draft positions unrolled in training, each through the same layer. Serve no more draft tokens than this."""


class DraftModelConfig(Section):
    """A small draft model: a language model of the policy's own architecture with few layers, which reads only tokens.
    It starts with the policy's embedding and head, and with layers of the policy evenly spaced from first to last."""

    type: Literal["draft_model"]
    """Kind of drafter."""
    num_layers: Annotated[int, Field(ge=2, le=4)] = 2
    """Number of decoder layers, at most the policy's."""
    trained_depth: PositiveInt = 3
    """Draft positions that the training loss covers. Serve no more draft tokens than this."""


MTP_FORMATS = tomllib.loads((Path(__file__).parent / "mtp" / "formats.toml").read_text(encoding="utf-8"))
NATIVE_HEAD_ARCHITECTURES = {
    policy: table.get("without", policy) for table in MTP_FORMATS.values() for policy in table["policies"]
}
"""Policies whose checkpoint may hold an MTP head: the architecture in its config.json, and that without the head."""

BLOCK_DRAFTERS = ("dflash", "dspark")
"""Types that propose a whole block in one pass."""
KINDS = ("eagle3", *BLOCK_DRAFTERS, "mtp", "draft_model")
"""All types."""

DrafterModelConfig = Annotated[Eagle3Config | DFlashConfig | MtpConfig | DraftModelConfig, Field(discriminator="type")]
