"""Sums behind the metrics of one policy step, over its micro-batches, minibatches and ranks."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from cotrain.policy.losses import WEIGHT_SQUARE


class MetricSums:
    """Collects on each rank; means() is the one exchange between ranks."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # sum and count
        self._steps: list[tuple[float, float, float]] = []
        self._ratio_max = 0.0

    def add_tokens(self, values: Mapping[str, Tensor]) -> None:
        """Add values [N] of one micro-batch's response tokens, of which the mean is logged, or the largest ratio."""
        for name, tensor in values.items():
            if name == "ratio_max":
                self._ratio_max = max(self._ratio_max, float(tensor.max()))
            else:
                self._tokens[name][0] += float(tensor.double().sum())
                self._tokens[name][1] += tensor.numel()

    def add_step(self, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Add one optimizer step; all three are the same on every rank."""
        self._steps.append((loss, grad_norm, learning_rate))

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics under their logged names, the same on every rank; call on all of them."""
        names = sorted(self._tokens)
        local = torch.tensor([self._tokens[name] for name in names], dtype=torch.float64, device=accelerator.device)
        totals = accelerator.reduce(local, "sum")
        metrics = {f"policy/{name}": float(total / count) for name, (total, count) in zip(names, totals, strict=True)}
        square = metrics.pop(f"policy/{WEIGHT_SQUARE}", None)
        if square is not None:
            # Kish's effective sample size as a share of the tokens: (sum w)^2 / (N sum w^2).
            metrics["policy/behaviour_ess"] = metrics["policy/behaviour_weight_mean"] ** 2 / square if square else 0.0
        ratio_max = accelerator.gather(torch.tensor([self._ratio_max], device=accelerator.device)).max()
        losses, grad_norms, learning_rates = zip(*self._steps, strict=True)
        return {
            **metrics,
            "policy/loss": sum(losses) / len(losses),
            "policy/grad_norm": sum(grad_norms) / len(grad_norms),
            "policy/ratio_max": float(ratio_max),
            "policy/learning_rate": learning_rates[-1],
        }
