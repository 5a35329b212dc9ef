"""What `cotrain init` found: the figures of init.json, and the summary a person reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.run.console import duration
from pipelines.initialise.served import Served


@dataclass(frozen=True)
class Figures:
    """init.json."""

    policy: str
    source: dict[str, Any]
    data_fingerprint: str
    training_rollouts: int
    holdout_rollouts: int
    response_tokens: int
    vocabulary_coverage: float
    """Share of the held-out response tokens in the draft vocabulary."""
    updates: int
    planned_updates: int
    best_update: int
    expected_acceptance_length: float
    """Of the best drafter on the hold-out, as the engine would count it."""
    expected_acceptance_rates: list[float]
    draft_tokens: int
    draft_sample_method: str
    served: Served
    served_digests: dict[str, str]
    """blake2b of each drafter tensor, read back from the engine."""
    seconds: float


def summary(figures: Figures, config: RunConfig, folder: Path, registered_model: str, version: int | None) -> list[str]:
    """For somebody who has not seen one before."""
    served, k = figures.served, figures.draft_tokens
    rates = [("expected", figures.expected_acceptance_rates), ("served", served.acceptance_rates)]
    lines = [
        f"Done: a drafter for {figures.policy} from {figures.response_tokens:,} response tokens in "
        f"{duration(figures.seconds)}",
        "",
        f"  data         {figures.training_rollouts:,} rollouts trained on, {figures.holdout_rollouts:,} held out "
        f"(source {figures.source['type']}, fingerprint {figures.data_fingerprint})",
        f"  vocabulary   covers {figures.vocabulary_coverage:.2%} of the held-out response tokens",
        f"  training     {figures.updates} of {figures.planned_updates} updates, best after {figures.best_update}",
        f"  acceptance   expected {figures.expected_acceptance_length:.3f}, served {served.acceptance_length:.3f}   "
        f"(tokens per verification step at k = {k}, {figures.draft_sample_method}; 1 is no gain, {k + 1} the most)",
    ]
    for name, values in rates:
        listed = "  ".join(f"{position}: {rate:.3f}" for position, rate in enumerate(values, start=1))
        lines.append(f"  {name:<12} {listed}   (share of steps that accept draft position 1 to k)")
    at_once = min(config.rollout.rollouts_per_step, served.num_rollouts)
    lines += [
        f"  speed        {served.tokens_per_s:,.0f} tok/s, {served.tokens_per_s_without:,.0f} without speculation: "
        f"{served.speedup:.2f} times, {at_once} requests at once, one run each; `cotrain bench` measures it well",
        "",
        f"  drafter      {folder}; serves in stock vLLM as it is",
    ]
    if version is not None:
        lines.append(f"  registered   models:/{registered_model}/{version} in MLflow")
    train = f"cotrain train CONFIG drafter.init={folder}"
    bench = f"cotrain bench --model {figures.policy} --drafter {folder}"
    return [*lines, "", "Next:", f"  train with it       {train}", f"  measure its speed   {bench}"]
