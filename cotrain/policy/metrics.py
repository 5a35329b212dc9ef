"""Sums behind the metrics of one policy step, over its micro-batches, minibatches and ranks."""

from collections import defaultdict

import torch
from accelerate import Accelerator
from torch import Tensor

from cotrain.policy.losses import PolicyLoss

WEIGHT_SQUARE = "behaviour_weight_square"
LIMITED = {"truncate": "behaviour_capped", "mask": "behaviour_masked"}
"""Name of the share of tokens whose behaviour weight is not their ratio, by policy.behaviour_correction."""


class MetricSums:
    """Collects on each rank; means() is the one exchange between ranks."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # sum and count
        self._steps: list[tuple[float, float, float]] = []
        self._ratio_max = 0.0

    def add_tokens(self, **values: Tensor | None) -> None:
        """Add values [N] of one micro-batch's response tokens; None is left out of the mean."""
        for name, tensor in values.items():
            if tensor is not None:
                self._tokens[name][0] += float(tensor.double().sum())
                self._tokens[name][1] += tensor.numel()

    def add_loss(self, result: PolicyLoss, correction: str) -> None:
        """Add what one micro-batch's loss is made of; the behaviour ratio is the one before any bound."""
        self.add_tokens(clip_fraction=result.clipped, kl_reference=result.kl_reference)
        self._ratio_max = max(self._ratio_max, float(result.ratio.max()))
        if (weights := result.behaviour) is not None:
            self.add_tokens(behaviour_ratio_mean=weights.ratio, behaviour_weight_mean=weights.weight)
            self.add_tokens(**{LIMITED[correction]: weights.limited, WEIGHT_SQUARE: weights.weight.double().square()})

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
