"""What a report reads: the record of a run (config.json, metrics.jsonl, provenance.json) and means over its steps.

A metric may be null or missing in any step; means are taken over the steps that have it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.run.decisions import FILE, read_decisions
from cotrain.run.metrics import read_metrics

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it."""

    folder: Path
    config: dict[str, Any]
    """config.json as it is: runs of older versions, with other fields, can be reported too."""
    rows: list[Row]
    """At least one; `step` rises."""
    attempts: list[dict[str, Any]]
    """Starts and resumes; empty when provenance.json is missing."""
    decisions: list[dict[str, Any]]
    """Events of the drafter, see drafting/decisions.py; empty in runs without."""

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.name)

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def column(self, metric: str) -> list[float | None]:
        """One value a step; None where it was not measured."""
        return column(self.rows, metric)

    def setting(self, path: str) -> Any:
        """Value of a field such as "policy.model"; None when it is not set."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(folder: Path) -> RunRecord:
    """Raises ValueError naming the file that is missing, empty or damaged, and what to do."""
    config = read_object(folder / "config.json", f"give the folder of a run; {folder} is none")
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{metrics}: no metrics yet; a report needs one finished step")
    try:
        rows = read_metrics(metrics)
    except ValueError as error:
        raise ValueError(f"{metrics}: a line is not valid JSON ({error}); remove that line") from None
    if not rows:
        raise ValueError(f"{metrics}: no metrics yet; a report needs one finished step")
    if any(not isinstance(row, dict) or not isinstance(row.get("step"), int) for row in rows):
        raise ValueError(f"{metrics}: a line has no 'step'; remove that line")
    provenance = folder / "provenance.json"
    attempts = read_object(provenance, "").get("attempts", []) if provenance.is_file() else []
    decisions = read_decisions(folder / FILE)
    return RunRecord(folder, config, sorted(rows, key=lambda row: row["step"]), attempts, decisions)


def read_object(path: Path, fix: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the path; `fix` is what to do when there is no such file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {fix}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); restore it or run again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not an object; restore it or run again")
    return content


def column(rows: Sequence[Row], metric: str) -> list[float | None]:
    """One value a row; None where it was not measured."""
    return [row.get(metric) for row in rows]


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of those that were measured; None of none."""
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def total(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values)


def from_to(values: Sequence[float | None], parts: int) -> tuple[float, float] | None:
    """Means over the first and the last of `parts` equal parts of the steps that have a value; None of none."""
    measured = [value for value in values if value is not None]
    span = max(1, len(measured) // parts)
    return (sum(measured[:span]) / span, sum(measured[-span:]) / span) if measured else None


def expected_of_served(rows: Sequence[Row]) -> list[float | None]:
    """Expected acceptance length of the drafter each step was served with.

    `rollout/expected_acceptance_length` is that, on the step's own rollouts. Older runs have only
    `drafter/expected_acceptance_length`, of the drafter as trained in a step, which serves from the next step on if the
    step published it.
    """
    expected: list[float | None] = [row.get("rollout/expected_acceptance_length") for row in rows]
    if any(value is not None for value in expected):
        return expected
    for i, row in enumerate(rows[:-1]):
        if row.get("drafter/published") and rows[i + 1]["step"] == row["step"] + 1:
            expected[i + 1] = row.get("drafter/expected_acceptance_length")
    return expected


def marked(rows: Sequence[Row]) -> dict[str, list[int]]:
    """What happened to the drafter, as indices of rows."""
    back = [i for i, row in enumerate(rows) if row.get("drafter/rolled_back")]
    return {
        "first step of a new drafter": [i for i in swapped(rows) if i - 1 not in back],
        "candidate kept back": [i for i, row in enumerate(rows) if row.get("gate/publish") == 0],
        "taken back after this step": back,
    }


def swapped(rows: Sequence[Row]) -> list[int]:
    """Indices of the rows served with another drafter than the last row before that tells its drafter."""
    changed: list[int] = []
    before: int | None = None
    for i, row in enumerate(rows):
        version = row.get("versions/drafter")
        if version is not None and before is not None and version != before:
            changed.append(i)
        before = before if version is None else version
    return changed


def served_lag(rows: Sequence[Row]) -> list[float | None]:
    """Policy versions between the rollouts of a step and the newest rollouts its drafter can have trained on.

    A drafter that a gate judged was trained on the rollouts up to the step before. Of a drafter that the record starts
    with: policy versions since then. None for one that was taken back.
    """
    lag: list[float | None] = []
    changed = set(swapped(rows))
    newest_data = rows[0].get("versions/policy") if rows else None
    for i, row in enumerate(rows):
        if i in changed:
            judged = rows[i - 1].get("gate/publish") is not None
            source = rows[max(i - 2, 0) if judged else i - 1]
            newest_data = None if rows[i - 1].get("drafter/rolled_back") else source.get("versions/policy")
        policy = row.get("versions/policy")
        lag.append(None if policy is None or newest_data is None else policy - newest_data)
    return lag
