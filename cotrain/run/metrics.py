"""metrics.jsonl: one JSON object a step, {"step": 12, "policy/reward": 0.41, ...}; the record every other view is
made from."""

import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Self

from cotrain.records import SpeculationCounts
from cotrain.run.row_file import RowFile, read_rows
from cotrain.run.served_drafts import metrics_of


class MetricsWriter:
    """Appends a row a step, readable at once with `tail -f`."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Keep the rows up to `resumed_step` (0: none); later ones are replayed by the resumed run."""
        self._last_step = resumed_step
        self._file = RowFile(path, resumed_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row. A value that is not finite becomes null under its name.

        Raises TypeError naming a metric that is no number, ValueError when the step does not go up.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after step {self._last_step}; steps only go up")
        self._file.write({"step": step} | {name: _number_or_none(name, value) for name, value in metrics.items()})
        self._last_step = step

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict]:
    """All rows. A last line without its line end (a run killed while writing) is left out."""
    return read_rows(path)


def speculation_metrics(counts: SpeculationCounts | None, k: int) -> dict[str, float]:
    """Drafting of one step, from counter deltas; empty when the step did not speculate.

    Names and definitions are vLLM's: rate of position i = steps that accepted draft token i / num_drafts. Acceptance
    is left out of a step that drafted nothing, because 1.00 would read as a drafter that fails.
    """
    if counts is None:
        return {}
    metrics: dict[str, float] = {
        "rollout/draft_tokens": counts.num_draft_tokens,
        "rollout/num_drafts": counts.num_drafts,
    }
    if counts.num_drafts:
        metrics["rollout/acceptance_length"] = counts.acceptance_length
        metrics |= metrics_of(counts)
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
