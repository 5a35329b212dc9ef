"""Configuration of a drafter model. Imports no torch, so that --help stays fast."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Section(BaseModel):
    """Base of every configuration section: frozen, unknown fields refused, docstrings are help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    """Base of the configuration of each kind of drafter."""

    num_aux_layers: ClassVar[int] = 0
    """Target layers that are read beside the final hidden state."""
    first_weights: ClassVar[str] = "random init"
    """What a new one starts with, unless the policy brings a head."""


class Eagle3Config(ModelSection):
    """EAGLE-3: one Llama-style layer over hidden states of three target layers."""

    num_aux_layers: ClassVar[int] = 3

    type: Literal["eagle3"]
    """Kind of drafter."""
    draft_vocab_size: PositiveInt = 8192
    """Tokens the drafter can propose, chosen by frequency in the first rollouts. At most the target's vocabulary."""
    aux_layers: tuple[int, int, int] | None = None
    """Target layers whose input residual stream is read, ascending (id k = Hugging Face hidden_states[k]).
    Default: 2, N//2, N-3 for a target of N layers."""
    trained_depth: PositiveInt = 3
    """Draft positions unrolled in training (training-time test). Serve no more draft tokens than this."""


class MtpConfig(ModelSection):
    """MTP: one decoder layer over the target's final hidden state; embedding and head are always the target's.
    A policy that brings such a head of its own starts with that one; all others start from random weights."""

    type: Literal["mtp"]
    """Kind of drafter."""
    trained_depth: PositiveInt = 3
    """Draft positions unrolled in training, each through the same layer. Serve no more draft tokens than this."""


class DraftModelConfig(ModelSection):
    """A small draft model: a language model of the policy's own kind with few layers, which reads tokens alone.
    It starts as layers of the policy, evenly spaced from the first to the last, with its embedding and head."""

    first_weights: ClassVar[str] = "layers of the policy"

    type: Literal["draft_model"]
    """Kind of drafter."""
    num_layers: Annotated[int, Field(ge=2, le=4)] = 2
    """Decoder layers. At most the policy's."""
    trained_depth: PositiveInt = 3
    """Draft positions that are trained. Serve no more draft tokens than this."""


NATIVE_HEAD_ARCHITECTURES = {"MiMoForCausalLM": "Qwen2ForCausalLM", "Qwen3NextForCausalLM": "Qwen3NextForCausalLM"}
"""Policies that may bring an MTP head of their own, by the architecture in their config.json, and without it."""

DrafterModelConfig = Annotated[Eagle3Config | MtpConfig | DraftModelConfig, Field(discriminator="type")]


class ObjectiveConfig(Section):
    """What the drafter is trained to maximise. Acceptance is that of the engine's sampler: see drafters/losses.py."""

    type: Literal["soft_cross_entropy", "lk_hybrid"] = "lk_hybrid"
    """soft_cross_entropy: against the target's distribution at the rollout temperature.
    lk_hybrid: cross-entropy while acceptance is low, acceptance itself as it rises (weights exp(-3 alpha)
    and 1 - exp(-3 alpha), arXiv 2602.23881)."""
    depth_weights: Literal["reach", "decay"] = "reach"
    """Weight of a draft position: the probability that verification reaches it from that start, or 0.8**k."""
