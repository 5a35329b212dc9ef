"""GPUs and models of the roofline, from data/hardware.toml and data/models.toml, and the drafters that go with a model."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).parent / "data"

Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Kernel:
    """An operation takes launch_s + request_s * requests + (moving^sharpness + computing^sharpness)^(1 / sharpness).

    Moving bytes and computing take the times of the data sheet over the efficiencies.
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
    """Seconds that the host adds to a step, and which steps run outside CUDA graphs."""

    step_s: float
    """In every step: scheduling, inputs, sampling."""
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
    """Taken where nothing was measured on the system in question."""


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
    """Billions, as the model's card has it."""
    source: str
    experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False
    weights: Precision = "bf16"
    """Of the layers. Embedding and head are in bf16."""
    kv_cache: Precision = "bf16"

    def _layers(self, experts: int) -> float:
        attention = self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * self.hidden * (attention + 3.0 * self.intermediate * max(experts, 1) + self.experts)

    @property
    def _ends(self) -> int:
        return (1 if self.tied_embeddings else 2) * self.vocabulary * self.hidden

    @property
    def total_parameters(self) -> float:
        return self._layers(self.experts) + self._ends

    @property
    def active_parameters(self) -> float:
        """Those that a token is multiplied with: of the experts those that it is sent to, of the ends the head."""
        return self._layers(self.experts_per_token) + self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> float:
        return self._layers(self.experts) * BYTES[self.weights] + self._ends * BYTES["bf16"]

    @property
    def kv_bytes(self) -> float:
        """Bytes of a token of context, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES[self.kv_cache]


@dataclass(frozen=True)
class DrafterShape:
    """A drafter of one layer in bf16, with the heads of its target, which runs once for each draft token."""

    target: Model
    kind: Literal["eagle3", "mtp"] = "eagle3"
    draft_vocabulary: int = 32_000
    """Of EAGLE-3. MTP has the target's."""

    @property
    def head_rows(self) -> int:
        return self.draft_vocabulary if self.kind == "eagle3" else self.target.vocabulary

    @property
    def attention_width(self) -> int:
        """The attention of EAGLE-3 reads embedding and hidden state side by side."""
        return (2 if self.kind == "eagle3" else 1) * self.target.hidden

    @property
    def fused_width(self) -> int:
        """What a first matrix makes one hidden state of: three aux layers, or embedding and hidden state in MTP."""
        return (3 if self.kind == "eagle3" else 2) * self.target.hidden

    @property
    def intermediate(self) -> int:
        """That of a dense target, and three hidden sizes beside experts."""
        return 3 * self.target.hidden if self.target.experts else self.target.intermediate

    @property
    def parameters(self) -> float:
        t = self.target
        attention = t.head_dim * (self.attention_width * (t.heads + 2 * t.kv_heads) + t.hidden * t.heads)
        return attention + t.hidden * (self.fused_width + 3.0 * self.intermediate + self.head_rows)

    @property
    def kv_bytes(self) -> float:
        return 2 * self.target.kv_heads * self.target.head_dim * BYTES["bf16"]


@cache
def tables(name: str) -> dict[str, Any]:
    """Of data/<name>.toml."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def _entry(file: str, kind: str, name: str) -> dict[str, Any]:
    known = tables(file)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no {kind} {name!r} in cotrain/simulation/data/{file}.toml: it has {', '.join(known)}.{hint}")
    return {**known[name]}


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
