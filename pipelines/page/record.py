"""The folder of a run or study by its name, and what a report reads of a run's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from cotrain.config.errors import did_you_mean
from cotrain.config.schema import default_run_root
from cotrain.run.provenance import flatten
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import FAILURE
from drafters.files import read_object

CONFIG, STUDY = "config.json", "study.json"
OF_ENGINES = ("num_speculative_tokens", "draft_sample_method")
SIDECAR_FIELDS = {"model": "policy.model"} | {name: f"rollout.{name}" for name in OF_ENGINES}
"""Fields of a sidecar's configuration that describe the host's engines, and what a run calls the same fields."""


@dataclass(frozen=True)
class RunRecord:
    """One run, as read from its folder."""

    settings: dict[str, Any]
    """config.json flattened to {"policy.model": ...}, unchecked, so that runs of other versions can be reported too."""
    metrics: pd.DataFrame
    """A row for each step, a column for each metric, NaN where it was not measured. The index is the step."""
    decisions: list[dict[str, Any]]  # events of the drafter, see cotrain/run/rows.py
    failure: str | None = None  # why the last attempt failed; None if it did not, or was killed

    @property
    def warning(self) -> str:
        """What a reader must know before anything else: that the run ended early. Empty if it did not."""
        last, planned = int(self.metrics.index[-1]), self.settings.get("steps", 0)
        if self.failure:
            return f"This run failed after step {last}, and all below is about the steps before. {self.failure}"
        early = f"This run has made {last} of its {planned} steps: it was stopped or killed, or still runs."
        return early if last < planned else ""

    @property
    def is_sidecar(self) -> bool:
        """Whether this is a sidecar: drafter training alone, beside somebody else's trainer or server."""
        return "spool" in self.settings

    @property
    def speculates(self) -> bool:
        """Whether anything proposes draft tokens."""
        return "drafter.model.type" in self.settings or "rollout.history.max_bytes" in self.settings

    def column(self, metric: str) -> pd.Series:
        """One value per step; all NaN when no step measured the metric."""
        return self.metrics.get(metric, pd.Series(float("nan"), index=self.metrics.index))


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Raises ValueError naming the file that is missing, empty or damaged, and what to do."""
    settings, metrics = flatten(read_object(folder / CONFIG)), folder / "metrics.jsonl"
    settings |= {alike: settings[name] for name, alike in SIDECAR_FIELDS.items() if name in settings}
    if not (rows := read_rows(metrics)):
        raise ValueError(f"{metrics}: no metrics yet; a report needs one finished step")
    table = pd.DataFrame(rows).set_index("step").sort_index().astype(float)
    failure = folder / "logs" / "latest" / FAILURE
    reason = failure.read_text() if failure.is_file() else None
    return RunRecord(settings, table, read_rows(folder / "decisions.jsonl"), reason)


def find(name: str) -> Path:
    """The folder of a run or study, by path or by name in the run root. Raises ValueError naming those there if it is none."""
    root = default_run_root()
    for folder in (Path(name), root / name):
        if (folder / STUDY).is_file() or (folder / CONFIG).is_file():
            return folder
    known = sorted({path.parent.name for file in (CONFIG, STUDY) for path in root.glob(f"*/{file}")})
    raise ValueError(
        f"RUN|STUDY: {name!r} is neither a run (with {CONFIG}) nor a study (with {STUDY}), here or in {root}, "
        f"which holds {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    )
