"""metrics.jsonl: one JSON object a step, {"step": 12, "policy/reward": 0.41, ...}. Every other view is made from it."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path

from cotrain.records import SpeculationCounts
from cotrain.run.row_file import RowFile, read_rows
from cotrain.run.served_drafts import metrics_of

read_metrics = read_rows


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends a row a step."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Keep the rows up to `resumed_step` (0: none); the resumed run writes later ones again."""
        self._last_step = resumed_step
        self._file = RowFile(path, resumed_step)
        self.close = self._file.close

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row. A value that is not finite becomes null under its name.

        Raises TypeError naming a metric that is no number, ValueError when the step does not go up.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after step {self._last_step}; steps only go up")
        self._file.write({"step": step} | {name: _number_or_none(name, value) for name, value in metrics.items()})
        self._last_step = step

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def speculation_metrics(counts: SpeculationCounts | None, k: int) -> dict[str, float]:
    """Drafting of one step, from counter deltas; empty when the step did not speculate.

    Names and definitions are vLLM's: the rate of position i is the share of drafts that accepted draft token i.
    Acceptance is left out of a step that drafted nothing, because 1.00 would read as a drafter that fails.
    """
    if counts is None:
        return {}
    metrics: dict[str, float] = {
        "rollout/draft_tokens": counts.num_draft_tokens,
        "rollout/num_drafts": counts.num_drafts,
    }
    if counts.num_drafts:
        metrics |= {"rollout/acceptance_length": counts.acceptance_length} | metrics_of(counts)
        accepted = counts.accepted_per_position + (0,) * (k - len(counts.accepted_per_position))
        for position, steps_accepted in enumerate(accepted, start=1):
            metrics[f"rollout/acceptance_rate_pos_{position}"] = steps_accepted / counts.num_drafts
    return metrics


def _number_or_none(name: str, value: object) -> float | int | None:
    if not isinstance(value, Real):
        raise TypeError(f"metric {name} is a {type(value).__name__}, not a number; convert it where it is made")
    if not math.isfinite(value):
        return None
    return int(value) if isinstance(value, int) else float(value)
