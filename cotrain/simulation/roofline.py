"""Step times on a GPU, from data sheets, shapes of model and drafter, and constants fitted to measured operators.

A step of B requests with k draft tokens computes B (k + 1) rows. Its time is that of the model over all rows, k passes of the
drafter, and the host. GPUs are in data/hardware.toml, models in data/models.toml.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from cotrain.config.errors import did_you_mean
from cotrain.simulation.step_time import Array, MeasuredCells

LOGIT_BYTES, UNIT_BYTES = 24, 46
"""Bytes that a row moves besides weights: of each logit, in six float32 passes of the sampler; and of each hidden unit of a layer,
with inputs and outputs of matrix products and six passes of small kernels."""


@dataclass(frozen=True)
class Hardware:
    """A GPU: bytes, bytes and dense bf16 operations per second by the data sheet, and fitted constants.

    A matrix product takes (moving^sharpness + computing^sharpness)^(1 / sharpness), where moving and computing are the times of its
    bytes and operations by the data sheet, each divided by its efficiency. A layer takes layer_s for launches and small kernels, and
    request_s for the attention of each request, besides reading the KV cache. The host adds its two times to every step and to each
    pass of the drafter. Outside CUDA graphs it launches the ten operations of a layer one by one, in at least eager_layer_s.
    """

    memory_bytes: float
    memory_bandwidth: float
    flops: float
    bandwidth_efficiency: float
    flops_efficiency: float
    sharpness: float
    attention_efficiency: float
    layer_s: float
    request_s: float
    all_reduce_s: float
    all_reduce_bandwidth: float
    host_step_s: float
    host_draft_s: float
    eager_layer_s: float
    source: str


@dataclass(frozen=True)
class Model:
    """A bf16 decoder with gated feed-forward layers. With experts, `intermediate` is the width of one expert."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    source: str
    experts: int = 1
    experts_per_token: int = 1
    fused: int = 0
    """Input width of the matrix that fuses a drafter's inputs to `hidden`; 0 without one."""

    def drafter(self, kind: str) -> "Model":
        """Return the drafter: one dense layer, run once per draft token. MTP fuses the embedding and the hidden state, and drafts
        all tokens; EAGLE-3 fuses three hidden states, and drafts one of 32,000 tokens."""
        width, vocabulary = (2, self.vocabulary) if kind == "mtp" else (3, 32_000)
        wide = self.intermediate if self.experts == 1 else 3 * self.hidden
        shape = replace(self, layers=1, intermediate=wide, experts=1, experts_per_token=1)
        return replace(shape, vocabulary=vocabulary, fused=width * self.hidden)

    def parameters(self, experts: Array | float) -> Array | float:
        """Parameters of all layers and the head, with so many experts a layer."""
        layer = 2 * self.head_dim * (self.heads + self.kv_heads) + 3.0 * self.intermediate * experts
        return self.hidden * (self.layers * layer + self.fused + self.vocabulary)

    @property
    def kv_bytes(self) -> float:
        """KV cache bytes of a token of context, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


@cache
def entries(file: str) -> dict[str, Any]:
    """By name, the GPUs of data/hardware.toml or the models of data/models.toml."""
    kind = Hardware if file == "hardware" else Model
    text = (Path(__file__).parent / "data" / f"{file}.toml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, kind]).validate_python(tomllib.loads(text))  # type: ignore[valid-type]


def known(file: str, name: str) -> str:
    """Return the name without a hub's organisation. Raises ValueError for one that data/<file>.toml does not hold."""
    short, names = name.rpartition("/")[2], list(entries(file))
    if short not in names:
        raise ValueError(f"{name!r} is not in data/{file}.toml: {', '.join(names)}{did_you_mean(short, names)}")
    return short


@dataclass(frozen=True)
class Roofline:
    """The methods of MeasuredCells. The KV cache is read once for all rows of a request. A drafter is split over the GPUs like its
    target (vLLM's default). Steps of more than `graph_tokens` rows run outside CUDA graphs."""

    hardware: Hardware
    model: Model
    drafter: Model
    tensor_parallel: int = 1
    graph_tokens: float = np.inf

    def base(self, k: int, batch: Array) -> Array:
        rows, least, drafter = batch * (k + 1.0), self.hardware.eager_layer_s, self.drafter
        seconds, eager = self._pass(self.model, rows, batch), rows > self.graph_tokens
        seconds = np.where(eager, np.maximum(seconds, self.model.layers * least), seconds) + self.hardware.host_step_s
        if k:
            drafting = self._pass(drafter, rows, batch) + (k - 1) * self._pass(drafter, batch, batch)
            # Twice, since the head and other operations take as long as the layer.
            drafting = np.where(eager, np.maximum(drafting, 2 * k * drafter.layers * least), drafting)
            seconds = seconds + drafting + k * self.hardware.host_draft_s
        return seconds

    def slope(self, k: int) -> float:
        read = self.model.kv_bytes + k * self.drafter.kv_bytes
        shards = min(self.tensor_parallel, self.model.kv_heads)
        return read / shards / (self.hardware.memory_bandwidth * self.hardware.attention_efficiency)

    def prefill(self, num_tokens: float) -> float:
        """Leaves out attention between the tokens of a prompt, which matters only from some ten thousand tokens on."""
        return float(self._pass(self.model, np.array(num_tokens), np.ones(1))[0]) if num_tokens else 0.0

    def covers(self, k: int, batch: int) -> bool:
        return True

    def _pass(self, m: Model, rows: Array, batch: Array) -> Array:
        """Time of all layers and the head. Of E experts, E (1 - (1 - K/E)^T) are read for T rows that choose K at random each."""
        gpu, gpus = self.hardware, self.tensor_parallel
        read = m.experts * (1 - (1 - m.experts_per_token / m.experts) ** rows)
        moved = 2 * m.parameters(read) / gpus + rows * (LOGIT_BYTES * m.vocabulary + UNIT_BYTES * m.layers * m.hidden)
        moving = moved / (gpu.memory_bandwidth * gpu.bandwidth_efficiency)
        computing = 2 * rows * m.parameters(m.experts_per_token) / gpus / (gpu.flops * gpu.flops_efficiency)
        products = (moving**gpu.sharpness + computing**gpu.sharpness) ** (1 / gpu.sharpness)
        reduced = 2 * (gpu.all_reduce_s + rows * m.hidden * 2 / gpu.all_reduce_bandwidth) if gpus > 1 else 0.0
        return products + m.layers * (gpu.layer_s + gpu.request_s * batch + reduced)


StepTimes = MeasuredCells | Roofline
