"""What a drafter needs to know about its target model, read from the target's folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from drafters.files import end_token_ids, read_config, unused_token_id

COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
"""Fields of `TargetSpec` that every config.json has under the same name."""

EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon")
"""Names that families of models have for the eps of their norms."""

PLAIN: dict[str, object] = {
    "hidden_act": "silu", "is_causal": True, "bias": False, "qkv_bias": False, "qk_norm": False, "logit_scale": 1,
    "layer_scale": False, "attn_output_gate": True, "ada_rms_norm_t_cond": False, "llama_4_scaling": None,
    "dual_chunk_attention_config": None,
}  # fmt: skip
"""Fields of config.json that some of vLLM's layers read and transformers' do not, with the value that changes nothing. vLLM has no
other activation than silu for these models."""

PLAIN_IN: dict[str, dict[str, object]] = {
    "llama": {"sliding_window": 0},
    "mistral": {"attention_bias": False, "mlp_bias": False, "layer_types": None},
    "qwen2": {},
    "qwen3": {"attention_bias": False},
    "qwen3_next": {"attention_bias": False},
}
"""More of them, which in these families are not read by one of the two, by model_type. Fields of other families are not compared;
there the first step's comparison of hidden states finds a difference."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: how many there are, how many a token goes through, and how wide they are."""

    number: int
    per_token: int
    size: int
    shared_size: int  # width of the expert that all tokens go through
    normed: bool  # the weights of the chosen experts sum to 1
    scale: float = 1.0  # on the output of the chosen experts
    groups: int = 1  # of which some are chosen first


@dataclass(frozen=True)
class TargetSpec:
    """Sizes of a Llama-style model: the fields of its config.json that a drafter's layers depend on."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # whole, as transformers 5 normalises them; of layers with full attention
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()  # at which the engine ends a response; always in the draft vocabulary
    experts: Experts | None = None  # of layer 0, or of the layers behind the last, if there are any in place of an MLP
    tie_word_embeddings: bool = False  # the embedding is the output head too
    sliding_window: int | None = None  # latest tokens that every layer attends to, and a drafter's too; None: all
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # heads of GLM-4.5 norm queries and keys
    unused_token_id: int | None = field(default=None, compare=False)  # a token that text never has, if there is one

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read a model's folder. Raises ValueError naming the field that is missing in its config.json."""
        spec = cls.from_config(read_config(folder), folder)
        return replace(
            spec, eos_token_ids=end_token_ids(folder), unused_token_id=unused_token_id(folder, spec.vocab_size)
        )

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str | Path) -> Self:
        """Read the contents of `source`/config.json, of its text model if it has others. Raises ValueError naming a missing field."""
        config = config | (config.get("text_config") or {})
        config["rms_norm_eps"] = next((config[name] for name in EPS if config.get(name) is not None), None)

        def required(name: str) -> Any:
            if config.get(name) is None:
                raise ValueError(f"{source}/config.json has no {name}, which every Llama-style model has")
            return config[name]

        heads, hidden_size = required("num_attention_heads"), required("hidden_size")
        return cls(
            model_type=required("model_type"),
            num_layers=required("num_hidden_layers"),
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden_size // heads,
            rope_parameters=_rope_parameters(config),
            experts=_experts(config),
            sliding_window=windows.pop() if len(windows := set(_windows(config))) == 1 else None,
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            attention_bias=bool(config.get("attention_bias")),
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=bool(config.get("use_qk_norm")),
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
        return {
            **{name: getattr(self, name) for name in (*COPIED, "num_key_value_heads", "head_dim")},
            "num_hidden_layers": self.num_layers,
            "hidden_act": "silu",
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_parameters": dict(self.rope_parameters),
            "tie_word_embeddings": False,
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,
            "eos_token_id": list(self.eos_token_ids) or None,
        }


def read_sizes(
    folder: str | Path, target: TargetSpec, problems_of: Callable[[dict[str, Any], TargetSpec], Iterable[str]]
) -> tuple[dict[str, Any], TargetSpec]:
    """Return the config.json of a drafter and the sizes that it states, with the end tokens of the target.

    Raises ValueError with all that `problems_of` finds in them, or when they were made for another target.
    """
    config = read_config(folder)
    sizes = TargetSpec.from_config(config, folder)
    if problems := "; ".join(problems_of(config, sizes)):
        raise ValueError(f"{folder}/config.json: {problems}")
    sizes.check_made_for(target, ("vocab_size", "hidden_size"), folder)
    return config, replace(sizes, eos_token_ids=target.eos_token_ids)


def other_values(config: dict[str, Any], wanted: Mapping[str, object]) -> list[str]:
    """List the fields that a config.json states and that do not have the wanted value."""
    return [f"{name} = {config[name]!r}" for name, value in wanted.items() if config.get(name) not in (None, value)]


def served_otherwise(config: dict[str, Any]) -> list[str]:
    """List the fields of a config.json with which vLLM serves another model than transformers trains, or none at all."""
    if (more := PLAIN_IN.get(config.get("model_type", ""))) is None:
        return []
    fields = other_values(config, PLAIN | more)
    return fields + ["a sliding_window in some of the layers"] * (len(set(_windows(config))) > 1)


def _windows(config: dict[str, Any]) -> list[int | None]:
    """Return the sliding window of each layer, as transformers reads a config.json."""
    qwen, layers = config.get("model_type") in ("qwen2", "qwen3"), config.get("num_hidden_layers", 1)
    window = config.get("sliding_window", 4096 if qwen or config.get("model_type") == "mistral" else None) or None
    if qwen and not config.get("use_sliding_window"):
        window = None
    first = min(config.get("max_window_layers", 28), layers) if qwen else 0
    types = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    return [window if kind == "sliding_attention" else None for kind in types]


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope parameters of a config.json of any age, those of full attention if they differ by kind of layer."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if nested := [value for value in rope.values() if isinstance(value, dict)]:
        rope = dict(rope.get("full_attention") or nested[0])
    names = ("rope_theta", "partial_rotary_factor")
    rope = {name: config[name] for name in names if config.get(name) is not None} | rope
    kinds = [rope.pop(name, None) for name in ("rope_type", "type")]
    kind = next(filter(None, kinds), "default")
    # Text has three equal positions, with which mrope is plain rotation.
    rope = {"rope_type": "default" if kind == "mrope" else kind, **rope}
    if kind in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        rope[name] = config.get(name) or rope.get(name) or config.get("max_position_embeddings")
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = _default_theta(config)
    return rope


def _default_theta(config: dict[str, Any]) -> float:
    from transformers import CONFIG_MAPPING  # takes a second, and nearly every config.json states its base

    known = config.get("model_type") in CONFIG_MAPPING
    theta = getattr(CONFIG_MAPPING[config["model_type"]], "default_theta", 1e4) if known else 1e4
    return next(iter(theta.values())) if isinstance(theta, dict) else theta  # the first is that of full attention


def _experts(config: dict[str, Any]) -> Experts | None:
    per_token, size = config.get("num_experts_per_tok", 1), config.get("moe_intermediate_size", 0)
    normed = config.get("norm_topk_prob", True)
    if number := config.get("n_routed_experts"):  # GLM and DeepSeek
        shared, scale = size * (config.get("n_shared_experts") or 0), config.get("routed_scaling_factor", 1.0)
        return Experts(number, per_token, size, shared, normed, scale, config.get("n_group") or 1)
    every = config.get("decoder_sparse_step", 1)
    if not config.get("num_experts") or every != 1 or 0 in (config.get("mlp_only_layers") or ()):
        return None
    return Experts(config["num_experts"], per_token, size, config.get("shared_expert_intermediate_size", 0), normed)
