"""The checkpoint formats of MTP heads: one row for each that can be trained and served.

In all of them the head's sizes are the target's, because vLLM builds it from the target's configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from drafters.mtp.layer import MiMoHead, MtpHead, Qwen3NextHead
from drafters.target import TargetSpec

NUM_HEADS = "num_nextn_predict_layers"
"""Heads in a checkpoint, in config.json; draft position k would be proposed by head k."""


@dataclass(frozen=True)
class HeadFormat:
    """A row describes how one family of models stores its MTP head."""

    prefix: str  # begins the names of the head's tensors in a checkpoint
    module: Callable[[TargetSpec], MtpHead]
    architecture: str  # by which vLLM knows the drafter's folder, in its config.json
    model_type: str  # likewise
    target_overrides: tuple[tuple[str, object], ...] = ()  # see drafters.base.ServingSpec
    policy_config: tuple[tuple[str, object], ...] = ()  # fields of the policy's config.json once its head is split off

    @property
    def tensors(self) -> str:
        """Return the beginning of the names of all heads of a checkpoint."""
        return self.prefix.removesuffix("0.")

    @property
    def config(self) -> dict[str, object]:
        """Return the fields of config.json by which vLLM knows the drafter's folder."""
        return {"architectures": [self.architecture], "model_type": self.model_type}


MIMO = HeadFormat(
    prefix="model.mtp_layers.0.",
    module=MiMoHead,
    architecture="MiMoForCausalLM",
    model_type="qwen2",
    target_overrides=((NUM_HEADS, 1),),
    policy_config=(("architectures", ["Qwen2ForCausalLM"]), ("model_type", "qwen2")),
)
QWEN3_NEXT = HeadFormat(prefix="mtp.", module=Qwen3NextHead, architecture="Qwen3NextMTP", model_type="qwen3_next")

NATIVE_ARCHITECTURES = {"MiMoForCausalLM": MIMO, "Qwen3NextForCausalLM": QWEN3_NEXT}
"""Policies that may bring a head, by the architecture in their config.json."""

TARGETS = {"llama": MIMO, "mistral": MIMO, "qwen2": MIMO, "qwen3": MIMO, "qwen3_next": QWEN3_NEXT}
"""Format of the head that vLLM serves beside a target, by the target's model_type."""


def head_sizes(target: TargetSpec) -> TargetSpec:
    """Return the sizes of the head of a target. Raises ValueError when vLLM cannot serve one beside it."""
    found = TARGETS.get(target.model_type)
    if found is None:
        problem = (
            f"there is no checkpoint format of MTP heads for a target of model_type {target.model_type} (there is one "
            f"for {', '.join(TARGETS)})"
        )
    elif target.rope_type != "default":
        problem = (
            'MTP heads rotate as their target does, and only rope_type "default" can be trained, not '
            f"{target.rope_type!r}"
        )
    elif found is MIMO and target.hidden_size % target.num_attention_heads:
        problem = (
            f"MTP heads need a hidden size that their {target.num_attention_heads} attention heads divide, the target "
            f"has {target.hidden_size}"
        )
    elif (found is QWEN3_NEXT) != (target.experts is not None):
        has, needs = ("a", "no") if target.experts else ("no", "a")
        problem = (
            f"the target's first layer has {has} mixture of experts, where vLLM's head of this format needs {needs}"
        )
    elif found is MIMO:
        # The Qwen2 layer of this format knows no other width of a head.
        return replace(target, head_dim=target.hidden_size // target.num_attention_heads)
    else:
        return target
    raise ValueError(f'drafter.model.type: {problem}; use type = "eagle3"')
