"""The metrics of one policy step, over its micro-batches, minibatches and ranks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from cotrain.policy.losses import WEIGHT_SQUARE


def step_metrics(
    values: Sequence[Mapping[str, Tensor]], steps: Sequence[tuple[float, float, float]], accelerator: Accelerator
) -> dict[str, float]:
    """Return the metrics under their logged names, the same on every rank; call on all of them.

    values [N]: those of the response tokens of each of this rank's micro-batches. Their mean is logged, unless no rank
    has any, and the largest ratio_max. steps: loss, gradient norm and learning rate of each optimizer step, the same on every rank.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for of_batch in values:
        for name, tensor in of_batch.items():
            sums[name][0] += float(tensor.double().sum())
            sums[name][1] += tensor.numel()
    sums.pop("ratio_max")
    names = sorted(sums)
    local = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=accelerator.device)
    totals = accelerator.reduce(local, "sum")
    metrics = {
        f"policy/{name}": float(total / count) for name, (total, count) in zip(names, totals, strict=True) if count
    }
    square = metrics.pop(f"policy/{WEIGHT_SQUARE}", None)
    if square is not None:
        # Kish's effective sample size as a share of the tokens: (sum w)^2 / (N sum w^2).
        metrics["policy/behaviour_ess"] = metrics["policy/behaviour_weight_mean"] ** 2 / square if square else 0.0
    largest = torch.cat([of_batch["ratio_max"] for of_batch in values]).max()
    losses, grad_norms, learning_rates = zip(*steps, strict=True)
    return {
        **metrics,
        "policy/loss": sum(losses) / len(losses),
        "policy/grad_norm": sum(grad_norms) / len(grad_norms),
        "policy/ratio_max": float(accelerator.gather(largest[None]).max()),
        "policy/learning_rate": learning_rates[-1],
    }


BY_LAG = {"kl": "behaviour_kl", "rollout_log_prob_gap": "rollout_log_prob_gap"}
"""Values that are also logged by lag, and their names. At lag 0 they show how far engine and learner differ, above what
the lag adds."""


def by_lag(values: Mapping[str, Tensor], lags: Tensor, largest: int) -> dict[str, Tensor]:
    """Return the values of BY_LAG for the tokens of each lag, 0 to largest; lags [N] is that of each token."""
    lags = lags.to(values["kl"].device)
    every = range(largest + 1)
    return {f"{name}_lag_{lag}": values[key][lags == lag] for key, name in BY_LAG.items() for lag in every}
