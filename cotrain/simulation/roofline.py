"""Step times on a GPU, from data sheets, shapes of model and drafter, and constants fitted to measured operators.

A step of B requests with k draft tokens computes B (k + 1) rows. Its time is that of the layers and the head over all rows, the
sampler, k passes of the drafter, and the host. Only the host's terms are fitted to measured steps. GPUs are listed in
data/hardware.toml, models in data/models.toml.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import TypeAdapter

from cotrain.simulation.step_time import Array, Origin
from drafters.files import read_object

Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0}

SMALL_KERNELS_S, SMALL_PASSES = 10e-6, 6
"""Five small kernels of a layer (norms, rotary embedding, activation, residual sums, cache writes): seconds, passes over rows."""

SAMPLER_PASSES, MOST_ROWS = 6, 2048
"""Passes of the sampler over float32 logits; and rows of the largest matrix products that constants were fitted to."""

DRAFT_VOCABULARY = 32_000
"""Tokens that EAGLE-3 can draft."""

NOT_MODELLED = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "linear_num_key_heads")
"""Fields of a config.json with other attention, or with experts that every token is sent to."""


@dataclass(frozen=True)
class Kernel:
    """launch_s + request_s * requests + (moving^sharpness + computing^sharpness)^(1 / sharpness) seconds of an operation.

    moving and computing: the times of the bytes and of the operations by the data sheet, each divided by its efficiency.
    """

    bandwidth_efficiency: float
    launch_s: float
    error: Mapping[str, float]
    """Relative error of the fit: its mean, its 90 % quantile (p90), and the number of measured times behind both (cells)."""
    source: str
    flops_efficiency: float = 1.0
    sharpness: float = 1.0
    request_s: float = 0.0


@dataclass(frozen=True)
class Host:
    """Seconds that the host adds to every step, and which steps run outside CUDA graphs."""

    step_s: float
    draft_s: float
    """For each pass of the drafter. Measurements without speculation cannot tell it."""
    eager_layer_s: float
    """Least seconds of a layer outside graphs, where the host launches its ten operations one by one."""
    graph_tokens: int | None = None
    """Most rows of a step with a captured graph; None: all steps have one. vLLM's default was min(2 max_num_seqs, 512) until its
    pull request 50488 of 2026-07-30, which counts requests instead."""
    non_uniform: bool = False
    """Do requests have different numbers of draft tokens (n-gram)? Such steps run outside graphs."""
    source: str = "given"


@dataclass(frozen=True)
class Hardware:
    """A GPU. The vendor's figures come first: bytes, bytes per second (of the link one way), dense operations per second."""

    name: str
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    flops: Mapping[Precision, float]
    source: str
    gemm: Mapping[Precision, Kernel]
    experts: Mapping[Precision, Kernel]
    attention: Mapping[Precision, Kernel]
    all_reduce: Mapping[int, Kernel]
    """All-reduces in CUDA graphs, by the number of GPUs."""
    host: Host
    """Used where nothing was measured on the system itself."""


@dataclass(frozen=True)
class Model:
    """A decoder with gated feed-forward layers. With experts, `intermediate` is the width of one expert."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    parameters: float
    """Billions, by the model's card."""
    source: str
    experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False
    weights: Precision = "bf16"
    """Number format of the layers. Embedding and head are in bf16."""
    kv_cache: Precision = "bf16"
    read: int = 0
    """Input width of attention where it is not `hidden` (in a drafter); else 0."""
    fused: int = 0
    """Input width of the matrix that fuses a drafter's inputs to `hidden`; 0 without one."""
    fuses_always: bool = False
    """Whether every pass of the drafter fuses, not only the first."""

    def drafter(self, kind: Literal["eagle3", "mtp"] = "eagle3") -> "Model":
        """Return the drafter: one bf16 layer with these heads, run once per draft token. It uses the model's own embedding.

        MTP fuses the embedding and the hidden state, and drafts all tokens. EAGLE-3 fuses hidden states of three layers in the
        first pass, and later passes read its own. For a model with experts, `intermediate` is three times `hidden`.
        """
        mtp, hidden = kind == "mtp", self.hidden
        return replace(
            self,
            name=kind,
            layers=1,
            intermediate=3 * hidden if self.experts else self.intermediate,
            vocabulary=self.vocabulary if mtp else DRAFT_VOCABULARY,
            experts=0,
            tied_embeddings=True,
            weights="bf16",
            kv_cache="bf16",
            read=hidden if mtp else 2 * hidden,
            fused=2 * hidden if mtp else 3 * hidden,
            fuses_always=mtp,
        )

    def _count(self, experts: int, vocabularies: int) -> tuple[float, float]:
        """Parameters of the layers, and of embedding and head."""
        attention = (self.read or self.hidden) * (self.heads + 2 * self.kv_heads) + self.hidden * self.heads
        others = self.fused + 3.0 * self.intermediate * max(experts, 1) + self.experts
        ends = float(vocabularies * self.vocabulary * self.hidden)
        return self.layers * (self.head_dim * attention + self.hidden * others), ends

    @property
    def total_parameters(self) -> float:
        return sum(self._count(self.experts, 1 if self.tied_embeddings else 2))

    @property
    def active_parameters(self) -> float:
        """Parameters that a token is multiplied with: of the experts only those that it is sent to, and no embedding."""
        return sum(self._count(self.experts_per_token, 1))

    def forward_flops(self, sequences: Array) -> float:
        """Operations of a forward pass over sequences of these lengths [n], in tokens; a backward pass takes twice as many.

        2 per active parameter and token, and 4 per unit of attention width and pair of tokens, halved because attention is
        causal (Megatron-LM, arXiv 2104.04473).
        """
        width = self.layers * self.heads * self.head_dim
        return float((2 * self.active_parameters * sequences + 2 * width * sequences**2).sum())

    @property
    def weight_bytes(self) -> float:
        layers, ends = self._count(self.experts, 1 if self.tied_embeddings else 2)
        return layers * BYTES[self.weights] + ends * BYTES["bf16"]

    @property
    def kv_bytes(self) -> float:
        """KV cache bytes of a token of context, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES[self.kv_cache]


@cache
def tables(name: str) -> dict[str, Any]:
    """The tables of data/<name>.toml."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text(encoding="utf-8"))


def _entry(file: str, kind: str, name: str, other: str = "") -> dict[str, Any]:
    if name not in tables(file):
        known = f"cotrain/simulation/data/{file}.toml has {', '.join(tables(file))}{other}"
        raise ValueError(f"cost.{kind.lower()}: no {kind} {name!r}; {known}")
    return {"name": name} | tables(file)[name]


@cache
def hardware(name: str) -> Hardware:
    """Return the GPU of this name. Raises ValueError that names the known GPUs."""
    return TypeAdapter(Hardware).validate_python(_entry("hardware", "GPU", name))


def model(name: str) -> Model:
    """Return the model of this name or hub id, or that of a config.json. Raises ValueError that names the known models."""
    hub_ids = {entry["source"].split()[0]: known for known, entry in tables("models").items()}
    known, path = hub_ids.get(name, name), Path(name).expanduser()
    if known not in tables("models") and path.exists():
        return _described(read_object(path / "config.json" if path.is_dir() else path, "a Hugging Face model"), name)
    return Model(**_entry("models", "model", known, "; or give the path of another model's config.json"))


def _described(config: dict[str, Any], name: str) -> Model:
    """Return the model of a Hugging Face config.json. Raises ValueError for attention or experts that are not modelled."""
    config = config.get("text_config") or config
    if other := [field for field in NOT_MODELLED if config.get(field)]:
        raise ValueError(
            f"cost.model: {name} has {', '.join(other)}, which is not modelled; give measured cells instead"
        )
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    names |= {"vocabulary": "vocab_size", "intermediate": "moe_intermediate_size" if experts else "intermediate_size"}
    if missing := [field for field in names.values() if field not in config]:
        raise ValueError(f"cost.model: {name} lacks {', '.join(missing)}; give the config.json of a decoder")
    shape = {field: config[theirs] for field, theirs in names.items()}
    shape["kv_heads"] = config.get("num_key_value_heads") or shape["heads"]
    shape["head_dim"] = config.get("head_dim") or shape["hidden"] // shape["heads"]
    shape |= {"experts": experts, "experts_per_token": config.get("num_experts_per_tok") or 0}
    return Model(name, **shape, tied_embeddings=config.get("tie_word_embeddings", True), parameters=0.0, source=name)


def experts_read(tokens: Array, experts: int, per_token: int) -> Array:
    """Expected number of experts that at least one token is sent to, E (1 - (1 - K/E)^T), if each token chooses at random."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True)
class Roofline:
    """Step times summed over operators as in AIConfigurator (arXiv 2601.06288), with rounded rooflines instead of its tables.

    The KV cache is read once for all rows of a request. Expert and tensor parallelism are taken to cost the same. A drafter is
    split over the GPUs like its target (vLLM's default). Raises ValueError if weights do not fit, or heads cannot be split.
    """

    hardware: Hardware
    model: Model
    tensor_parallel: int = 1
    drafter: Model | None = None
    """None: draft tokens cost only their verification."""
    origin: ClassVar[Origin] = "roofline"

    def __post_init__(self) -> None:
        if self.model.heads % self.tensor_parallel:
            line = f"must divide {self.model.name}'s {self.model.heads} heads"
            raise ValueError(f"cost.tensor_parallel: {self.tensor_parallel} {line}")
        self.kv_tokens()

    @property
    def host(self) -> Host:
        return self.hardware.host

    def kv_tokens(self, request_tokens: int = 1, memory_share: float = 0.9) -> int:
        """Tokens of context that an engine holds in this share of its memory (vLLM's `gpu_memory_utilization`).

        Raises ValueError when a request with request_tokens of context does not fit beside the weights.
        """
        weights, cache = self.model.weight_bytes, self.model.kv_bytes
        if self.drafter:
            weights, cache = weights + self.drafter.weight_bytes, cache + self.drafter.kv_bytes
        usable, weights = self.hardware.memory_bytes * memory_share, weights / self.tensor_parallel
        tokens = int((usable - weights) / (cache / self._kv_shards))
        if tokens < request_tokens:
            raise ValueError(
                f"cost.model: {self.model.name} with a request of {request_tokens} tokens does not fit: weights take {weights / 1e9:.0f} "
                f"of {usable / 1e9:.0f} GB that may be used of a {self.hardware.name}, room is left for {max(tokens, 0)} "
                "tokens. Raise cost.tensor_parallel, choose a larger cost.gpu, or lower the length limit"
            )
        return tokens

    def base(self, k: int, batch: Array) -> Array:
        batch = np.asarray(batch, float)
        rows = batch * (k + 1)
        most = np.inf if self.host.graph_tokens is None else self.host.graph_tokens
        eager = (rows > most) | bool(self.host.non_uniform and k)
        seconds = self._target(rows, batch, rows)
        seconds = np.where(eager, np.maximum(seconds, self.model.layers * self.host.eager_layer_s), seconds)
        if k and self.drafter:
            later = self._pass(self.drafter, batch, batch, batch, self.drafter.fuses_always)
            drafting = self._pass(self.drafter, rows, batch, batch, True) + (k - 1) * later
            least = 2 * k * self.host.eager_layer_s  # twice: head and other operations take as long as the layer
            drafting = np.where(eager, np.maximum(drafting, least), drafting)
            seconds = seconds + drafting + k * self.host.draft_s
        return seconds + self.host.step_s

    def slope(self, k: int) -> float:
        reads = [(1, self.model), (k, self.drafter)] if self.drafter else [(1, self.model)]
        attention = self.hardware.attention
        moved = sum(times * m.kv_bytes / attention[m.kv_cache].bandwidth_efficiency for times, m in reads)
        return moved / self._kv_shards / self.hardware.memory_bandwidth

    def prefill(self, num_tokens: float) -> float:
        """Leaves out attention between the tokens of a prompt, which matters only from some ten thousand tokens on."""
        return float(self._target(np.array([num_tokens]), np.ones(1), np.ones(1))[0]) if num_tokens else 0.0

    def covers(self, k: int, batch: int) -> bool:
        return batch * (k + 1) <= MOST_ROWS

    @property
    def _kv_shards(self) -> int:
        return min(self.tensor_parallel, self.model.kv_heads)

    def _time(self, kernel: Kernel, moved: Array, flops: Array, precision: Precision) -> Array:
        moving = moved / (self.hardware.memory_bandwidth * kernel.bandwidth_efficiency)
        computing = flops / (self.hardware.flops[precision] * kernel.flops_efficiency)
        return kernel.launch_s + (moving**kernel.sharpness + computing**kernel.sharpness) ** (1 / kernel.sharpness)

    def _product(self, rows: Array, inputs: float, outputs: float, precision: Precision = "bf16") -> Array:
        moved = inputs * (outputs + rows) * BYTES[precision] + rows * outputs * 2
        return self._time(self.hardware.gemm[precision], moved, 2 * rows * inputs * outputs, precision)

    def _moving(self, num_bytes: Array) -> Array:
        return num_bytes / (self.hardware.memory_bandwidth * self.hardware.gemm["bf16"].bandwidth_efficiency)

    def _attention(self, m: Model, rows: Array, batch: Array) -> Array:
        """Time of a layer up to its feed-forward part, with small kernels and both all-reduces, without reading the KV cache."""
        known, gpus = self.hardware.all_reduce, self.tensor_parallel
        heads, kv_heads = m.heads / gpus, m.kv_heads / self._kv_shards
        kernel = self.hardware.attention[m.kv_cache]
        seconds = kernel.launch_s + kernel.request_s * batch
        seconds += self._product(rows, m.read or m.hidden, (heads + 2 * kv_heads) * m.head_dim, m.weights)
        seconds += self._product(rows, heads * m.head_dim, m.hidden, m.weights)
        seconds += SMALL_KERNELS_S + self._moving(SMALL_PASSES * rows * m.hidden * 2)
        if gpus > 1:  # an unmeasured number of GPUs takes the fit of the next smaller one
            fit = known[max(n for n in known if n <= gpus)]
            moving = rows * m.hidden * 2 / (self.hardware.link_bandwidth * fit.bandwidth_efficiency)
            seconds += 2 * (fit.launch_s + moving)
        return seconds

    def _feed_forward(self, m: Model, rows: Array) -> Array:
        """With experts: the router and the experts that are read; times of bytes and operations add up, which fits best."""
        gpus = self.tensor_parallel
        if not m.experts:
            width = m.intermediate / gpus
            return self._product(rows, m.hidden, 2 * width, m.weights) + self._product(rows, width, m.hidden, m.weights)
        weights = experts_read(rows, m.experts, m.experts_per_token) * 3 * m.hidden * m.intermediate * BYTES[m.weights]
        moved = weights + rows * m.experts_per_token * (2 * m.hidden + 3 * m.intermediate) * 2
        flops = 6 * rows * m.experts_per_token * m.hidden * m.intermediate
        router, kernel = self._product(rows, m.hidden, m.experts), self.hardware.experts[m.weights]
        return router + self._time(kernel, moved / gpus, flops / gpus, m.weights)

    def _pass(self, m: Model, rows: Array, batch: Array, head_rows: Array, fuses: bool = False) -> Array:
        """Time of all layers and the head."""
        layer = self._attention(m, rows, batch) + self._feed_forward(m, rows)
        fusing = self._product(rows, m.fused, m.hidden) if fuses else 0.0
        return m.layers * layer + fusing + self._product(head_rows, m.hidden, m.vocabulary / self.tensor_parallel)

    def _target(self, rows: Array, batch: Array, head_rows: Array) -> Array:
        sampler = self._moving(SAMPLER_PASSES * head_rows * self.model.vocabulary * 4)
        return self._pass(self.model, rows, batch, head_rows) + sampler
