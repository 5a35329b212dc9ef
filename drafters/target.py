"""What a drafter needs to know about its target model, read from the target's config.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from drafters.files import read_config

COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
"""Fields of `TargetSpec` that every config.json has under the same name."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: how many there are, how many a token goes through, and how wide they are."""

    number: int
    per_token: int
    size: int
    shared_size: int  # width of the expert that all tokens go through
    normed: bool  # the weights of the chosen experts sum to 1


@dataclass(frozen=True)
class TargetSpec:
    """Sizes of a Llama-style model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()  # always in the draft vocabulary
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that is rotated
    experts: Experts | None = None  # of layer 0, if it has experts in place of an MLP
    tie_word_embeddings: bool = False  # the embedding is the output head too

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read a model folder's config.json. Raises ValueError naming the field that is missing."""
        return cls.from_config(read_config(folder), folder)

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str | Path) -> Self:
        """Read the contents of `source`/config.json. Raises ValueError naming the field that is missing."""

        def required(name: str) -> Any:
            if config.get(name) is None:
                raise ValueError(f"{source}/config.json has no {name}, which every Llama-style model has")
            return config[name]

        heads, hidden_size = required("num_attention_heads"), required("hidden_size")
        eos = config.get("eos_token_id")
        # transformers 5 nests all facts about rotary positions; older configs keep two of them at the top level.
        rope = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
        for field in ("rope_scaling", "rope_parameters"):
            rope |= config.get(field) or {}
        return cls(
            model_type=required("model_type"),
            num_layers=required("num_hidden_layers"),
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden_size // heads,
            rope_theta=rope.get("rope_theta") or required("rope_theta"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            rope_type=rope.get("rope_type", rope.get("type", "default")),
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
            experts=_experts(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            **{name: required(name) for name in COPIED},
        )

    def check_made_for(self, target: Self, names: Sequence[str], source: str | Path) -> None:
        """Raise ValueError naming the first of the fields `names` in which the drafter in `source` does not fit the target."""
        for name in names:
            theirs, ours = getattr(self, name), getattr(target, name)
            if theirs != ours:
                raise ValueError(f"{source} was made for another target: its {name} is {theirs}, this one's is {ours}")

    def layer_config(self) -> dict[str, object]:
        """Return the config.json fields that every kind of drafter writes for these sizes."""
        names = (*COPIED, "num_key_value_heads", "head_dim", "rope_theta")
        return {
            **{name: getattr(self, name) for name in names},
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
        }


def _experts(config: dict[str, Any]) -> Experts | None:
    sparse = config.get("num_experts") and config.get("decoder_sparse_step", 1) == 1
    if not sparse or 0 in (config.get("mlp_only_layers") or ()):
        return None
    return Experts(
        number=config["num_experts"],
        per_token=config.get("num_experts_per_tok", 1),
        size=config.get("moe_intermediate_size", 0),
        shared_size=config.get("shared_expert_intermediate_size", 0),
        normed=config.get("norm_topk_prob", True),
    )
