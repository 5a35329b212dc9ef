"""Log-probs and entropy of response tokens, without ever holding the logits of a whole micro-batch.

With a vocabulary of 49k, the logits would be the memory peak of a policy update. So the head is applied only to positions that
predict a response token, one chunk at a time, and the backward pass recomputes the logits of each chunk.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

CHUNK_LOGITS = 2**25
"""Maximum number of logits in a chunk (128 MiB in float32; up to three tensors of this size exist at once)."""


class HeadLogProbs(torch.autograd.Function):
    """Compute log softmax(hidden @ weight.T / temperature)[target] and the entropy, in chunks of rows.

    With p the softmax and g the incoming gradient, d loss / d logits = g * (onehot(target) - p). The backward pass is written
    by hand instead of with torch.utils.checkpoint, because working in place is 1.4 times as fast on CPUs.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs [N] and entropy [N], both float32, from hidden [N, H], weight [V, H] and targets [N] int64.

        dtype is that of the matrix products; everything after them is float32.
        """
        scaled, weight_cast = (hidden / temperature).to(dtype), weight.to(dtype)
        # Allocate each output separately: under FSDP, outputs must not be views.
        log_probs, entropy, log_normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(len(hidden), len(weight)):
            logits = (scaled[rows] @ weight_cast.T).float()
            target_logits = logits.gather(1, targets[rows, None])[:, 0]
            maximum = logits.amax(1)
            logits.sub_(maximum[:, None])
            exponentials = logits.exp()
            normaliser = exponentials.sum(1)
            log_normaliser[rows] = normaliser.log() + maximum
            log_probs[rows] = target_logits - log_normaliser[rows]
            entropy[rows] = normaliser.log() - exponentials.mul_(logits).sum(1) / normaliser
        ctx.save_for_backward(hidden, weight, targets, log_normaliser)
        ctx.temperature, ctx.dtype = temperature, dtype
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Return the gradients of hidden [N, H] and weight [V, H]; gradients[0] is d loss / d log-probs [N]."""
        hidden, weight, targets, log_normaliser = ctx.saved_tensors
        scaled, weight_cast = (hidden / ctx.temperature).to(ctx.dtype), weight.to(ctx.dtype)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # with adapters, the head is frozen
        for rows in _chunks(len(hidden), len(weight)):
            gradient = gradients[0][rows, None]
            logits = (scaled[rows] @ weight_cast.T).float()
            logits_grad = logits.sub_(log_normaliser[rows, None]).exp_().mul_(-gradient)
            logits_grad.scatter_add_(1, targets[rows, None], gradient)
            cast = logits_grad.to(ctx.dtype)
            hidden_grad[rows] = (cast @ weight_cast).to(hidden.dtype) / ctx.temperature
            if weight_grad is None:
                continue
            if ctx.dtype == weight.dtype:
                weight_grad.addmm_(cast.T, scaled[rows])
            else:
                weight_grad += cast.T @ scaled[rows]
        return hidden_grad, weight_grad, None, None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocab_size)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


class ResponseLogProbs(nn.Module):
    """A causal language model whose forward pass returns log-probs instead of logits (so that DDP or FSDP can wrap it).

    Master weights are float32; with dtype bfloat16 the layers run under autocast.
    """

    def __init__(self, model: "PreTrainedModel", temperature: float, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.dtype = dtype

    def with_weights(self, function: Callable[[], T]) -> T:
        """Return function(), which may use the model directly: FSDP gathers weights around this method as around forward."""
        return function()

    def last_hidden(self, token_ids: Tensor, **kwargs: Any) -> Any:
        """Return the base model's output for token_ids [B, L]; last_hidden_state [B, L, H] is after the final norm."""
        with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.model.base_model(input_ids=token_ids, use_cache=False, return_dict=True, **kwargs)

    def forward(
        self, token_ids: Tensor, predictors: Tensor, targets: Tensor, **options: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs [N] and entropy [N] of `targets` at the temperature; flat positions `predictors` [N] predict them.

        options: positions and mask of rows that several responses share.
        """
        hidden = self.last_hidden(token_ids, **options).last_hidden_state
        rows = hidden.flatten(0, 1).index_select(0, predictors)
        head = self.model.get_output_embeddings().weight
        return HeadLogProbs.apply(rows, head, targets, self.temperature, self.dtype)
