"""The checkpoint formats of MTP heads that can be trained and served.

formats.toml has them. In all of them the head's sizes are the target's, because vLLM builds it from the target's configuration.
"""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from drafters.target import TargetSpec

NUM_HEADS = "num_nextn_predict_layers"
"""Field of config.json with the number of heads in a checkpoint, where head k would propose draft position k."""


@dataclass(frozen=True)
class HeadFormat:
    """How one family of models stores its MTP head, and what the head computes."""

    architecture: str  # in the drafter's config.json, by which vLLM recognises the head
    model_type: str  # likewise
    tensors: str  # prefix of the tensor names of all heads in a checkpoint
    prefix: str  # prefix of the tensor names of the first head
    layer: str  # prefix of the decoder layer's tensor names, after `prefix`
    names: dict[str, str]  # of the other modules of drafters.mtp.model.MtpHead, after `prefix`
    hidden_first: bool  # the joined vector has the hidden state before the embedding, which is zero at position 0
    gated: bool  # gated attention and zero-centred norms; otherwise attention has biases
    target_overrides: dict[str, object] = field(default_factory=dict)  # see drafters.base.ServingSpec

    def path(self, module: str) -> str:
        """Return the name that a module of MtpHead has in a checkpoint."""
        return self.prefix + self.names.get(module, self.layer + module)


TABLES = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
NATIVE_ARCHITECTURES = {name: HeadFormat(**table) for name, table in TABLES.items()}
"""Format of the MTP head in a policy's checkpoint, by the architecture in its config.json."""

MIMO, QWEN3_NEXT = NATIVE_ARCHITECTURES["MiMoForCausalLM"], NATIVE_ARCHITECTURES["Qwen3NextForCausalLM"]
TARGETS = {"llama": MIMO, "mistral": MIMO, "qwen2": MIMO, "qwen3": MIMO, "qwen3_next": QWEN3_NEXT}
"""Format of the head that vLLM serves beside a target, by the target's model_type."""


def head_sizes(target: TargetSpec) -> TargetSpec:
    """Return the sizes of an MTP head for a target. Raises ValueError when vLLM cannot serve one beside it."""
    found, heads = TARGETS.get(target.model_type), target.num_attention_heads
    if found is None:
        problem = (
            f"there is no checkpoint format of MTP heads for a target of model_type {target.model_type} (there is one "
            f"for {', '.join(TARGETS)})"
        )
    elif (kind := target.rope_parameters["rope_type"]) != "default":
        problem = f'an MTP head rotates as its target; only rope_type "default" is trained, not {kind!r}'
    elif found is QWEN3_NEXT and target.experts is not None:
        return target
    elif found is QWEN3_NEXT or target.experts is not None:
        has, needs = ("a", "no") if target.experts else ("no", "a")
        problem = f"the target's first layer has {has} mixture of experts, and vLLM's head needs {needs}"
    elif target.hidden_size % heads:
        problem = f"an MTP head needs a hidden size that its {heads} attention heads divide, not {target.hidden_size}"
    else:
        # The Qwen2 layer of this format has no other width of an attention head.
        return replace(target, head_dim=target.hidden_size // heads)
    raise ValueError(f'drafter.model.type: {problem}; use type = "eagle3"')
