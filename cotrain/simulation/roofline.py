"""Step times on a GPU, from data sheets, shapes of model and drafter, and constants fitted to measured operators.

A step of B requests with k draft tokens computes B (k + 1) rows. Its time is that of the model over all rows, k passes of the
drafter (one of a block drafter), and the host. GPUs are in data/gpus.toml, models in data/models.toml, and the times of the host in
data/engines.toml.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter

from cotrain.simulation.step_time import Array, MeasuredCells
from drafters.config import BLOCK_DRAFTERS

LOGIT_BYTES, UNIT_BYTES = 24, 46
"""Bytes that a row moves besides weights: of each logit, in six float32 passes of the sampler; and of each hidden unit of a layer,
with inputs and outputs of matrix products and six passes of small kernels."""


@dataclass(frozen=True)
class Hardware:
    """A GPU: fields of its data sheet in bytes, bytes/s and dense bf16 operations/s, and fitted constants, an H100's by default.

    A matrix product takes (moving^sharpness + computing^sharpness)^(1 / sharpness), where moving and computing are the times of its
    bytes and operations by the data sheet, each divided by its efficiency. A layer takes layer_s for launches and small kernels, and
    request_s for the attention of each request, besides reading the KV cache. Outside CUDA graphs the host launches the ten
    operations of a layer one by one, in at least eager_layer_s.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    memory_bytes: PositiveFloat
    memory_bandwidth: PositiveFloat
    flops: PositiveFloat
    source: str
    bandwidth_efficiency: float = 0.874
    flops_efficiency: float = 0.827
    sharpness: float = 3.02
    attention_efficiency: float = 0.93
    layer_s: float = 34.7e-6
    request_s: float = 0.113e-6
    all_reduce_s: float = 4.63e-6
    all_reduce_bandwidth: float = 152e9
    eager_layer_s: float = 212e-6


@dataclass(frozen=True)
class Engine:
    """The host's part of a step, by version of the engine: seconds of a step, and further ones of each pass of the drafter.

    With asynchronous scheduling the host prepares a step while the GPU computes the one before, so that only the longer counts.
    """

    host_step_s: float
    host_draft_s: float
    async_scheduling: Literal["always", "without_drafts", "never"]
    source: str


@dataclass(frozen=True)
class Model:
    """A decoder with gated feed-forward layers, its fields those of a config.json. With experts, `intermediate` is the width of one."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    layers: NonNegativeInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate: PositiveInt
    vocabulary: NonNegativeInt
    source: str
    experts: PositiveInt = 1
    experts_per_token: PositiveInt = 1
    weight_bytes: PositiveFloat = 2.0
    """Bytes of a weight: 2 in bf16, 1 in fp8, whose operations per second and efficiencies the GPU must then have."""
    fused: int = 0
    """Input width of the matrix that fuses a drafter's inputs to `hidden`; 0 without one."""
    one_pass: bool = False
    """As a drafter it proposes all its tokens in one pass, with a row for each."""

    def drafter(self, kind: str) -> "Model":
        """Return the drafter, of dense layers. EAGLE-3 fuses three hidden states, and its layer drafts one of 32,000 tokens; MTP's
        fuses the embedding and the hidden state, and drafts any token. Both run once per draft token. DFlash and DSpark have five layers,
        five hidden states and the target's head, as public checkpoints."""
        layers, width = {"eagle3": (1, 3), "mtp": (1, 2)}.get(kind, (5, 5))
        wide = self.intermediate if self.experts == 1 else 3 * self.hidden
        shape = replace(self, layers=layers, intermediate=wide, experts=1, experts_per_token=1)
        shape = replace(shape, weight_bytes=2.0, one_pass=kind in BLOCK_DRAFTERS, fused=width * self.hidden)
        return replace(shape, vocabulary=32_000) if kind == "eagle3" else shape

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
    """By name, the entries of data/<file>.toml: gpus, models or engines."""
    kind = {"gpus": Hardware, "models": Model, "engines": Engine}[file]
    text = (Path(__file__).parent / "data" / f"{file}.toml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, kind]).validate_python(tomllib.loads(text))  # type: ignore[valid-type]


@dataclass(frozen=True)
class Roofline:
    """The methods of MeasuredCells that give times. The KV cache is read once for all rows of a request. A drafter is split over
    the GPUs like its target (vLLM's default). Steps of more than `graph_tokens` rows run outside CUDA graphs."""

    hardware: Hardware
    model: Model
    drafter: Model
    engine: Engine
    tensor_parallel: int = 1
    graph_tokens: float = np.inf

    def base(self, k: int, batch: Array) -> Array:
        rows, least, drafter = batch * (k + 1.0), self.hardware.eager_layer_s, self.drafter
        seconds, eager = self._pass(self.model, rows, batch), rows > self.graph_tokens
        seconds = np.where(eager, np.maximum(seconds, self.model.layers * least), seconds)
        if k:
            passes = self._passes(k)
            drafting = self._pass(drafter, rows, batch) + (passes - 1) * self._pass(drafter, batch, batch)
            # Twice, since the head and other operations take as long as the layer.
            drafting = np.where(eager, np.maximum(drafting, 2 * passes * drafter.layers * least), drafting)
            seconds = seconds + drafting + passes * self.engine.host_draft_s
        host, scheduling = self.engine.host_step_s, self.engine.async_scheduling
        hidden = scheduling == "always" or (scheduling == "without_drafts" and not k)
        return np.maximum(seconds, host) if hidden else seconds + host

    def slope(self, k: int) -> float:
        read = self.model.kv_bytes + self._passes(k) * self.drafter.kv_bytes
        shards = min(self.tensor_parallel, self.model.kv_heads)
        return read / shards / (self.hardware.memory_bandwidth * self.hardware.attention_efficiency)

    def prefill(self, num_tokens: float) -> float:
        """Leaves out attention between the tokens of a prompt, which matters only from some ten thousand tokens on."""
        return float(self._pass(self.model, np.array(num_tokens), np.ones(1))[0]) if num_tokens else 0.0

    def _passes(self, k: int) -> int:
        return min(k, 1) if self.drafter.one_pass else k

    def _pass(self, m: Model, rows: Array, batch: Array) -> Array:
        """Time of all layers and the head. Of E experts, E (1 - (1 - K/E)^T) are read for T rows that choose K at random each."""
        gpu, gpus = self.hardware, self.tensor_parallel
        read = m.experts * (1 - (1 - m.experts_per_token / m.experts) ** rows)
        of_row = LOGIT_BYTES * m.vocabulary + UNIT_BYTES * m.layers * m.hidden
        moved = m.weight_bytes * m.parameters(read) / gpus + rows * of_row
        moving = moved / (gpu.memory_bandwidth * gpu.bandwidth_efficiency)
        computing = 2 * rows * m.parameters(m.experts_per_token) / gpus / (gpu.flops * gpu.flops_efficiency)
        products = (moving**gpu.sharpness + computing**gpu.sharpness) ** (1 / gpu.sharpness)
        reduced = 2 * (gpu.all_reduce_s + rows * m.hidden * 2 / gpu.all_reduce_bandwidth) if gpus > 1 else 0.0
        return products + m.layers * (gpu.layer_s + gpu.request_s * batch + reduced)


class CalibratedRoofline:
    """A roofline that gives measured times where steps were measured, and goes on from them elsewhere.

    Its times, without those of reading the context, are multiplied by the ratio of measured to predicted, linear in log batch size
    and in k between measurements, and constant beyond them. Without drafts it is 1 unless it was measured, so that measured
    drafts alone make no step without them slower. As in MeasuredCells, noise makes no gain.
    """

    def __init__(self, roofline: Roofline, cells: Mapping[tuple[int, int], float], context: float):
        """cells: seconds of a decode step by draft length and batch size, where each request has `context` tokens. Raises
        ValueError for a time that is too short to read the context."""
        self._roofline, self.slope, self.prefill = roofline, roofline.slope, roofline.prefill
        ratios: dict[int, dict[float, float]] = {}
        for (k, batch), seconds in sorted(cells.items()):
            ratio = (seconds - roofline.slope(k) * batch * context) / roofline.base(k, np.array([batch]))[0]
            if ratio <= 0:
                fix = f"give the context of these measurements as cells_context, which is {context:g}"
                raise ValueError(f"cost.cells: {seconds * 1e3:g} ms are too few to read the context of {batch}; {fix}")
            ratios.setdefault(k, {})[batch] = float(ratio)
        self._ratios = {0: {1.0: 1.0}} | ratios

    def base(self, k: int, batch: Array) -> Array:
        return np.minimum.reduce([self._corrected(n, batch) for n in {k, *self._ratios} if n >= k])

    def _corrected(self, k: int, batch: Array) -> Array:
        parts = [np.interp(np.log(batch), np.log([*row]), [*row.values()]) for row in self._ratios.values()]
        place = float(np.interp(k, [*self._ratios], np.arange(len(parts))))
        lower, upper = parts[int(place)], parts[-int(-place // 1)]
        return self._roofline.base(k, batch) * (lower + (place % 1) * (upper - lower))


StepTimes = MeasuredCells | Roofline | CalibratedRoofline
