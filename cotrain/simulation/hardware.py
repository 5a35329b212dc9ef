"""GPUs and models of the roofline, from data/hardware.toml and data/models.toml, and the drafters that go with a model."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cotrain.simulation.step_time import Array

Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Kernel:
    """launch_s + request_s * requests + (moving^sharpness + computing^sharpness)^(1 / sharpness) seconds of an operation.

    Moving bytes and computing take what the data sheet promises over the efficiency.
    """

    bandwidth_efficiency: float
    launch_s: float
    error: Mapping[str, float]
    """Relative error of the fit: mean and 90 % quantile (p90) over so many cells."""
    source: str
    flops_efficiency: float = 1.0
    sharpness: float = 1.0
    request_s: float = 0.0


@dataclass(frozen=True)
class Host:
    """Seconds that the host adds to every step, and which steps run outside CUDA graphs."""

    step_s: float
    draft_s: float
    """For each pass of the drafter. No measurement without speculation tells it."""
    eager_layer_s: float
    """Least seconds of a layer outside graphs, where the host starts ten operations one by one."""
    graph_tokens: int | None = None
    """Rows up to which steps were captured; None: all. vLLM's default was min(2 max_num_seqs, 512) until its pull request
    50488 of 2026-07-30, which counts requests instead."""
    non_uniform: bool = False
    """Do requests have different numbers of draft tokens (n-gram)? Such steps run outside graphs."""
    source: str = "given"


@dataclass(frozen=True)
class Hardware:
    """A GPU: first what the vendor states. Bytes, bytes a second (of the link one way), dense operations a second."""

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
    """In CUDA graphs, by the number of GPUs."""
    host: Host
    """Where nothing was measured on the system itself."""


@dataclass(frozen=True)
class Model:
    """A decoder of gated layers. With experts, intermediate is that of one."""

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

    def _count(self, experts: int, vocabularies: int) -> tuple[float, float]:
        """Parameters of the layers, and of embedding and head."""
        attention = self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = self.hidden * (attention + 3.0 * self.intermediate * max(experts, 1) + self.experts)
        return self.layers * layer, float(vocabularies * self.vocabulary * self.hidden)

    @property
    def total_parameters(self) -> float:
        return sum(self._count(self.experts, 1 if self.tied_embeddings else 2))

    @property
    def active_parameters(self) -> float:
        """Those that a token is multiplied with: of the experts those that it is sent to, no embedding."""
        return sum(self._count(self.experts_per_token, 1))

    def forward_flops(self, sequences: Array) -> float:
        """Operations of a forward pass over [n] sequences of so many tokens; a backward pass is two of them.

        2 for each active parameter and token, and 4 for each unit of attention width and pair of tokens, of which a causal
        model computes half (Megatron-LM, arXiv 2104.04473).
        """
        width = self.layers * self.heads * self.head_dim
        return float((2 * self.active_parameters * sequences + 2 * width * sequences**2).sum())

    @property
    def weight_bytes(self) -> float:
        layers, ends = self._count(self.experts, 1 if self.tied_embeddings else 2)
        return layers * BYTES[self.weights] + ends * BYTES["bf16"]

    @property
    def kv_bytes(self) -> float:
        """Bytes of a token of context, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES[self.kv_cache]


@dataclass(frozen=True)
class DrafterShape:
    """A layer in bf16 with the heads of its target, which runs once for each draft token."""

    target: Model
    kind: Literal["eagle3", "mtp"] = "eagle3"
    draft_vocabulary: int = 32_000
    """Tokens that EAGLE-3 can draft. MTP has the vocabulary of the target."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """What a first matrix fuses (aux layers; in MTP embedding and hidden state), attention reads, and the head emits."""
        if self.kind == "mtp":
            return 2 * self.target.hidden, self.target.hidden, self.target.vocabulary
        return 3 * self.target.hidden, 2 * self.target.hidden, self.draft_vocabulary

    @property
    def intermediate(self) -> int:
        """That of a dense target, three hidden sizes beside experts."""
        return 3 * self.target.hidden if self.target.experts else self.target.intermediate

    @property
    def parameters(self) -> float:
        t, (fused, read, rows) = self.target, self.widths
        attention = t.head_dim * (read * (t.heads + 2 * t.kv_heads) + t.hidden * t.heads)
        return attention + t.hidden * (fused + 3.0 * self.intermediate + rows)

    @property
    def kv_bytes(self) -> float:
        return 2 * self.target.kv_heads * self.target.head_dim * BYTES["bf16"]


@cache
def tables(name: str) -> dict[str, Any]:
    """The tables of data/<name>.toml."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text(encoding="utf-8"))


def _entry(file: str, kind: str, name: str) -> dict[str, Any]:
    if name not in tables(file):
        raise ValueError(f"no {kind} {name!r}: cotrain/simulation/data/{file}.toml has {', '.join(tables(file))}")
    return {**tables(file)[name]}


def hardware(name: str) -> Hardware:
    """Raises ValueError that names the known GPUs."""
    entry = _entry("hardware", "GPU", name)
    for kind in ("gemm", "experts", "attention"):
        entry[kind] = {precision: Kernel(**constants) for precision, constants in entry[kind].items()}
    entry["all_reduce"] = {int(gpus): Kernel(**constants) for gpus, constants in entry["all_reduce"].items()}
    return Hardware(name, **{**entry, "host": Host(**entry["host"])})


def model(name: str) -> Model:
    """Raises ValueError that names the known models."""
    return Model(name, **_entry("models", "model", name))
