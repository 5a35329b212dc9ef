"""The checkpoint formats of MTP heads: one row for each that can be trained and served.

In all of them the head's sizes are the target's, because vLLM builds it from the target's configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drafters.base import TargetSpec
from drafters.mtp.layer import MiMoHead, MtpHead, MtpShape, Qwen3NextHead

NUM_HEADS = "num_nextn_predict_layers"
"""Heads in a checkpoint, in config.json; draft position k would be proposed by head k."""


@dataclass(frozen=True)
class HeadFormat:
    """How one family of models stores its MTP head."""

    name: str
    prefix: str  # of the head's tensors in a checkpoint
    module: Callable[[MtpShape], MtpHead]
    config: dict[str, object]  # by which vLLM knows the drafter's folder
    target_overrides: tuple[tuple[str, object], ...]  # see drafters.base.Serving
    policy_config: dict[str, object]  # what the policy's config.json becomes when its head is split off

    @property
    def tensors(self) -> str:
        """How the names of all heads of a checkpoint begin."""
        return self.prefix.removesuffix("0.")

    @property
    def architectures(self) -> list[str]:
        """In config.json of a drafter's folder."""
        return list(self.config["architectures"])  # type: ignore[call-overload]

    def head_dim(self, target: TargetSpec) -> int:
        """Of the head's attention; MiMo's Qwen2 layer knows no other than hidden_size / heads."""
        return target.hidden_size // target.num_attention_heads if self.name == MIMO else target.head_dim


MIMO, QWEN3_NEXT = "mimo", "qwen3_next"

FORMATS = {
    MIMO: HeadFormat(
        name=MIMO,
        prefix="model.mtp_layers.0.",
        module=MiMoHead,
        config={"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"},
        target_overrides=((NUM_HEADS, 1),),
        policy_config={"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    ),
    QWEN3_NEXT: HeadFormat(
        name=QWEN3_NEXT,
        prefix="mtp.",
        module=Qwen3NextHead,
        config={"architectures": ["Qwen3NextMTP"], "model_type": "qwen3_next"},
        target_overrides=(),
        policy_config={},
    ),
}

NATIVE_ARCHITECTURES = {"MiMoForCausalLM": FORMATS[MIMO], "Qwen3NextForCausalLM": FORMATS[QWEN3_NEXT]}
"""Policies that may bring a head, by the architecture in their config.json."""

SCRATCH_TARGETS = {"llama": MIMO, "mistral": MIMO, "qwen2": MIMO, "qwen3": MIMO, "qwen3_next": QWEN3_NEXT}
"""Format of a head that is trained from scratch, by the target's model_type."""


def format_of(config: dict[str, Any]) -> HeadFormat:
    """Format of a drafter folder's config.json. One that `load_drafter` knows."""
    return next(known for known in FORMATS.values() if known.architectures == config["architectures"][:1])
