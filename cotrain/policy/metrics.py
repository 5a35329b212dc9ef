"""Sums behind the metrics of one policy step, over its micro-batches, minibatches and ranks."""

import torch
from accelerate import Accelerator
from torch import Tensor

from cotrain.policy.losses import BehaviourWeights

WEIGHT_SQUARE = "behaviour_weight_square"


class MetricSums:
    """Collects on each rank; means() is the one exchange between ranks."""

    def __init__(self) -> None:
        self._token_sums: dict[str, float] = {}
        self._token_counts: dict[str, int] = {}
        self._ratio_max = 0.0
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._learning_rate = 0.0

    def add_tokens(self, **values: Tensor | None) -> None:
        """Values [N] of one micro-batch's response tokens; None is left out of the mean."""
        for name, tensor in values.items():
            if tensor is not None:
                self._token_sums[name] = self._token_sums.get(name, 0.0) + float(tensor.double().sum())
                self._token_counts[name] = self._token_counts.get(name, 0) + tensor.numel()

    def add_behaviour(self, behaviour: BehaviourWeights, correction: str) -> None:
        """What a behaviour correction did to one micro-batch; the ratio is the one before any bound."""
        limited = {"truncate": "behaviour_capped", "mask": "behaviour_masked"}[correction]
        self.add_tokens(
            behaviour_ratio_mean=behaviour.ratio,
            behaviour_weight_mean=behaviour.weight,
            **{limited: behaviour.limited, WEIGHT_SQUARE: behaviour.weight.double().square()},
        )

    def add_ratio(self, ratio: Tensor) -> None:
        """Importance ratios [N] of one micro-batch."""
        self._ratio_max = max(self._ratio_max, float(ratio.max()))

    def add_step(self, loss: float, grad_norm: float, learning_rate: float) -> None:
        """One optimizer step; all three are the same on every rank."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._learning_rate = learning_rate

    def means(self, accelerator: Accelerator) -> dict[str, float]:
        """Metrics under their logged names, the same on every rank; call on all of them."""
        names = sorted(self._token_sums)
        local = torch.tensor(
            [[self._token_sums[name], self._token_counts[name]] for name in names],
            dtype=torch.float64,
            device=accelerator.device,
        )
        totals = accelerator.reduce(local, "sum")
        token_means = {
            f"policy/{name}": float(total / count) for name, (total, count) in zip(names, totals, strict=True)
        }
        square = token_means.pop(f"policy/{WEIGHT_SQUARE}", None)
        if square is not None:
            # Kish's effective sample size as a share of the tokens: (sum w)^2 / (N sum w^2).
            mean = token_means["policy/behaviour_weight_mean"]
            token_means["policy/behaviour_ess"] = mean**2 / square if square else 0.0
        ratio_max = accelerator.gather(torch.tensor([self._ratio_max], device=accelerator.device)).max()
        return {
            **token_means,
            "policy/loss": sum(self._losses) / len(self._losses),
            "policy/grad_norm": sum(self._grad_norms) / len(self._grad_norms),
            "policy/ratio_max": float(ratio_max),
            "policy/learning_rate": self._learning_rate,
        }
