"""The checkpoint formats of MTP heads that can be trained and served.

formats.toml has them. In all of them the head's sizes are the target's, because vLLM builds it from the target's configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from drafters.config import MTP_FORMATS, NATIVE_HEAD_ARCHITECTURES
from drafters.target import TargetSpec

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of config.json with the number of heads in a checkpoint, where head k would propose draft position k."""

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the policy's embedding and output head that some checkpoints have beside an MTP head. vLLM reads the policy's own."""


@dataclass(frozen=True)
class HeadFormat:
    """How one family of models stores its MTP head, and what the head computes: a field for each way in which families differ."""

    architecture: str  # in the drafter's config.json, by which vLLM recognises the head
    model_type: str  # likewise
    counted_by: str  # the one of COUNTS that this family has
    tensors: str  # prefix of the tensor names of all heads in a checkpoint; {layers} stands for the number of the policy's layers
    prefix: str  # prefix of the tensor names of the first head
    layer: str  # prefix of the decoder layer's tensor names, after `prefix`
    names: dict[str, str]  # of the other modules of drafters.mtp.model.MtpHead, after `prefix`
    hidden_first: bool  # the joined vector has the hidden state before the embedding
    zero_first: bool  # the embedding at position 0 is zero
    recycles_normed: bool  # the next draft position is fed the state after the final norm, otherwise the one before it
    gated: bool  # gated attention, norms of queries and keys, and zero-centred norms
    experts: str  # "none": an MLP; "softmax", "sigmoid": a mixture of experts, by the scores that choose them
    target_overrides: dict[str, object] = field(default_factory=dict)  # see drafters.base.ServingSpec

    def path(self, module: str) -> str:
        """Return the name that a module of MtpHead has in a checkpoint."""
        return self.prefix + self.names.get(module, self.layer + module)

    def behind(self, num_layers: int) -> "HeadFormat":
        """Return the format of the head of a policy with so many layers."""
        tensors, prefix = (text.format(layers=num_layers) for text in (self.tensors, self.prefix))
        return replace(self, tensors=tensors, prefix=prefix)


def _whole(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table of formats.toml with the fields of the format that it is like."""
    return (_whole(MTP_FORMATS[table["like"]]) if "like" in table else {}) | table


FORMATS = {
    name: HeadFormat(**{f.name: whole[f.name] for f in fields(HeadFormat) if f.name in whole})
    for name, whole in ((name, _whole(table)) for name, table in MTP_FORMATS.items())
}
NATIVE_ARCHITECTURES = {policy: FORMATS[name] for name, table in MTP_FORMATS.items() for policy in table["policies"]}
"""Format of the MTP head in a policy's checkpoint, by the architecture in its config.json."""

TARGETS = {target: FORMATS[name] for name, table in MTP_FORMATS.items() for target in table["targets"]}
"""Format of the head that vLLM serves beside a target, by the target's model_type."""


def without_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a policy as it is without the MTP head that the checkpoint may bring."""
    own = (config.get("architectures") or ["none"])[0]
    if (without := NATIVE_HEAD_ARCHITECTURES.get(own)) is None:
        return dict(config)
    plain = {name: value for name, value in config.items() if name not in (*COUNTS, "auto_map")}
    if "text_config" in plain:
        plain["text_config"] = {name: value for name, value in plain["text_config"].items() if name not in COUNTS}
    model_type = config.get("model_type") if without == own else NATIVE_ARCHITECTURES[own].model_type
    return plain | {"architectures": [without], "model_type": model_type}


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
    elif (found.experts != "none") != (target.experts is not None):
        has, needs = ("a", "no") if target.experts else ("no", "a")
        problem = f"the target's first layer has {has} mixture of experts, and vLLM's head needs {needs}"
    elif target.experts is not None and target.experts.groups > 1:
        problem = f"experts are chosen from {target.experts.groups} groups (n_group), and only 1 is trained"
    elif found is not FORMATS["mimo"]:
        return target
    elif target.hidden_size % heads:
        problem = f"an MTP head needs a hidden size that its {heads} attention heads divide, not {target.hidden_size}"
    else:
        # The Qwen2 layer of this format has biases, and no other width of an attention head.
        return replace(target, head_dim=target.hidden_size // heads, attention_bias=True)
    raise ValueError(f'drafter.model.type: {problem}; use type = "eagle3"')
