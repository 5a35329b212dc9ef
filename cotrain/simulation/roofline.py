"""Seconds of a step on a GPU: data sheets, shapes of model and drafter, and constants fitted to measured operators.

A step of B requests with k draft tokens computes B (k + 1) rows: the layers and the head over all of them, the sampler,
k passes of the drafter, and what the host adds. Only the terms of the host are fitted to measured steps.
"""

import numpy as np

from cotrain.simulation.hardware import BYTES, DrafterShape, Hardware, Host, Kernel, Model, Precision
from cotrain.simulation.step_time import Array, Origin

SMALL_KERNELS_S, SMALL_PASSES = 10e-6, 6
"""Norms, rotary embedding, activation, residual sums, cache writes: five kernels a layer, that move a row six times."""

SAMPLER_PASSES, MOST_ROWS = 6, 2048
"""Passes of the sampler over float32 logits; and rows of the largest matrix products that constants were fitted to."""


def experts_read(tokens: Array, experts: int, per_token: int) -> Array:
    """Experts that at least one token is sent to, E (1 - (1 - K/E)^T), as if each token chose at random."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


class Roofline:
    """Operators are added up as in AIConfigurator (arXiv 2601.06288), with rounded rooflines in place of its tables.

    The cache is read once for all rows of a request. Expert and tensor parallelism cost alike. A drafter is split over the
    GPUs as its target is, which is vLLM's default.
    """

    origin: Origin = "roofline"

    def __init__(
        self,
        hardware: Hardware,
        model: Model,
        tensor_parallel: int = 1,
        drafter: DrafterShape | None = None,
        host: Host | None = None,
    ):
        """Without a drafter, draft tokens cost their verification alone. Without a host, it is that of the hardware.

        Raises ValueError when the weights do not fit, or the heads cannot be split.
        """
        if tensor_parallel < 1 or model.heads % tensor_parallel:
            raise ValueError(f"system.tensor_parallel {tensor_parallel} must divide {model.name}'s {model.heads} heads")
        self.hardware, self.model, self.drafter, self.host = hardware, model, drafter, host or hardware.host
        self.tensor_parallel, self._kv_shards = tensor_parallel, min(tensor_parallel, model.kv_heads)
        self._streaming = hardware.memory_bandwidth * hardware.gemm["bf16"].bandwidth_efficiency
        self.kv_tokens()

    def changed(self, hardware: Hardware | None = None, host: Host | None = None) -> "Roofline":
        return Roofline(hardware or self.hardware, self.model, self.tensor_parallel, self.drafter, host or self.host)

    def kv_tokens(self, request_tokens: int = 1, memory_share: float = 0.9) -> int:
        """Tokens of context that an engine holds in this share of its memory (`gpu_memory_utilization` of vLLM).

        Raises ValueError when the context of one request, so many tokens, does not fit beside the weights.
        """
        weights, cache = self.model.weight_bytes, self.model.kv_bytes
        if self.drafter:
            weights, cache = weights + self.drafter.parameters * BYTES["bf16"], cache + self.drafter.kv_bytes
        usable, weights = self.hardware.memory_bytes * memory_share, weights / self.tensor_parallel
        tokens = int((usable - weights) / (cache / self._kv_shards))
        if tokens < request_tokens:
            raise ValueError(
                f"{self.model.name} with a request of {request_tokens} tokens does not fit: weights take {weights / 1e9:.0f} "
                f"of {usable / 1e9:.0f} GB that may be used of a {self.hardware.name}, room is left for {max(tokens, 0)} "
                "tokens. Raise system.tensor_parallel, choose a larger system.gpu, or lower the length limit"
            )
        return tokens

    def base(self, k: int, batch: Array) -> Array:
        batch = np.asarray(batch, float)
        rows = batch * (k + 1)
        most = np.inf if self.host.graph_tokens is None else self.host.graph_tokens
        eager = (rows > most) | bool(self.host.non_uniform and k)
        seconds = self._forward(rows, batch, rows)
        seconds = np.where(eager, np.maximum(seconds, self.model.layers * self.host.eager_layer_s), seconds)
        if k and self.drafter:
            drafting = self._draft(rows, batch, first=True) + (k - 1) * self._draft(batch, batch, first=False)
            least = 2 * k * self.host.eager_layer_s  # the head and what is around the layer take as long as it
            drafting = np.where(eager, np.maximum(drafting, least), drafting)
            seconds = seconds + drafting + k * self.host.draft_s
        return seconds + self.host.step_s

    def slope(self, k: int) -> float:
        attention = self.hardware.attention
        moved = self.model.kv_bytes / attention[self.model.kv_cache].bandwidth_efficiency
        if k and self.drafter:
            moved += k * self.drafter.kv_bytes / attention["bf16"].bandwidth_efficiency
        return moved / self._kv_shards / self.hardware.memory_bandwidth

    def prefill(self, num_tokens: float) -> float:
        """Without attention between the tokens of a prompt, which matters from some ten thousand of them on."""
        return float(self._forward(np.array([num_tokens]), np.ones(1), np.ones(1))[0]) if num_tokens else 0.0

    def covers(self, k: int, batch: int) -> bool:
        return batch * (k + 1) <= MOST_ROWS

    def _time(self, kernel: Kernel, moved: Array, flops: Array, precision: Precision) -> Array:
        moving = moved / (self.hardware.memory_bandwidth * kernel.bandwidth_efficiency)
        computing = flops / (self.hardware.flops[precision] * kernel.flops_efficiency)
        return kernel.launch_s + (moving**kernel.sharpness + computing**kernel.sharpness) ** (1 / kernel.sharpness)

    def _product(self, rows: Array, inputs: float, outputs: float, precision: Precision = "bf16") -> Array:
        moved = inputs * (outputs + rows) * BYTES[precision] + rows * outputs * 2
        return self._time(self.hardware.gemm[precision], moved, 2 * rows * inputs * outputs, precision)

    def _attention(self, rows: Array, batch: Array, width: float, precision: Precision) -> Array:
        """A layer up to its feed-forward, with its small kernels and both all-reduces, without reading the cache."""
        m, known = self.model, self.hardware.all_reduce
        heads, kv_heads = m.heads / self.tensor_parallel, m.kv_heads / self._kv_shards
        kernel = self.hardware.attention[m.kv_cache]
        seconds = kernel.launch_s + kernel.request_s * batch
        seconds += self._product(rows, width, (heads + 2 * kv_heads) * m.head_dim, precision)
        seconds += self._product(rows, heads * m.head_dim, m.hidden, precision)
        seconds += SMALL_KERNELS_S + SMALL_PASSES * rows * m.hidden * 2 / self._streaming
        if self.tensor_parallel > 1:  # more GPUs than were measured take what the most take
            fit = known[max(gpus for gpus in known if gpus <= self.tensor_parallel)]
            moving = rows * m.hidden * 2 / (self.hardware.link_bandwidth * fit.bandwidth_efficiency)
            seconds += 2 * (fit.launch_s + moving)
        return seconds

    def _dense(self, rows: Array, intermediate: int, precision: Precision) -> Array:
        hidden, width = self.model.hidden, intermediate / self.tensor_parallel
        return self._product(rows, hidden, 2 * width, precision) + self._product(rows, width, hidden, precision)

    def _experts(self, rows: Array) -> Array:
        """The router, and the experts that are read. Bytes and operations are added, which fits the tables best."""
        m = self.model
        weights = experts_read(rows, m.experts, m.experts_per_token) * 3 * m.hidden * m.intermediate * BYTES[m.weights]
        moved = weights + rows * m.experts_per_token * (2 * m.hidden + 3 * m.intermediate) * 2
        flops = 6 * rows * m.experts_per_token * m.hidden * m.intermediate
        router, kernel = self._product(rows, m.hidden, m.experts), self.hardware.experts[m.weights]
        return router + self._time(kernel, moved / self.tensor_parallel, flops / self.tensor_parallel, m.weights)

    def _forward(self, rows: Array, batch: Array, logit_rows: Array) -> Array:
        m = self.model
        layer = self._attention(rows, batch, m.hidden, m.weights)
        layer += self._experts(rows) if m.experts else self._dense(rows, m.intermediate, m.weights)
        head = self._product(logit_rows, m.hidden, m.vocabulary / self.tensor_parallel)
        return m.layers * layer + head + SAMPLER_PASSES * logit_rows * m.vocabulary * 4 / self._streaming

    def _draft(self, rows: Array, batch: Array, first: bool) -> Array:
        """A pass of the drafter: the first over the rows that were verified, later ones over a row a request."""
        assert self.drafter is not None
        d, hidden, (fused, read, head_rows) = self.drafter, self.model.hidden, self.drafter.widths
        seconds = self._attention(rows, batch, read, "bf16") + self._dense(rows, d.intermediate, "bf16")
        if first or d.kind == "mtp":  # EAGLE-3 feeds later passes its own hidden states
            seconds += self._product(rows, fused, hidden)
        return seconds + self._product(batch, hidden, head_rows / self.tensor_parallel)
