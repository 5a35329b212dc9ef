"""What the report of a study shows: the comparison of its arms, their curves with the spread over seeds, what failed."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from drafters.files import read_object
from pipelines.page.page import MOST_LINES, REPORT, Section, line_section, write_page
from pipelines.page.record import STUDY, RunRecord, read_run

NONE = "-"
LENGTH, SPEED, REWARD = "rollout/acceptance_length", "rollout/tokens_per_s", "policy/reward"
TOKENS, STEP_TIME = "rollout/generated_tokens", "time/step_s"
GAIN, STEP_GAIN = "tokens/s, x no speculation", "whole step, x no speculation"
COMPARED = {"acceptance length": LENGTH, GAIN: GAIN, STEP_GAIN: STEP_GAIN, "reward": REWARD}
"""Columns of the comparison, and the metric that each shows."""

HOW_TO_READ = (
    "Means over the last third of the steps, then over seeds, with (lowest..highest). Speeds are ratios to the "
    "no-speculation arm of the same policy and seed, and acceptance length 1 is no gain. table.csv has all metrics."
)


@dataclass(frozen=True)
class StudyRecord:
    """A study with its finished runs."""

    about: dict[str, Any]  # what study.json says: name, number of steps, seeds and arms
    runs: pd.DataFrame  # a row for each run: its folder, arm and seed, and "finished" or why it is not
    finished: dict[tuple[str, int], RunRecord]  # by arm and seed

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The metrics of each finished run, by arm, seed and step."""
        columns = [LENGTH, SPEED, REWARD, TOKENS, STEP_TIME]
        nothing = pd.DataFrame(columns=columns, index=pd.Index([], name="step"), dtype=float)
        tables = {key: run.metrics for key, run in self.finished.items()}
        return pd.concat({(NONE, NONE): nothing} | tables, names=["arm", "seed"])

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Means over the last third of the steps, and the speed ratios GAIN and STEP_GAIN, by arm and seed."""
        before = self.about["steps"] - max(1, self.about["steps"] // 3)
        late = self.steps[self.steps.index.get_level_values("step") > before]
        means = late.groupby(["arm", "seed"], sort=False).mean()
        plain = {_compared(run): key for key, run in self.finished.items() if not run.speculates}
        baselines = [plain.get(_compared(self.finished[key]), (NONE, NONE)) for key in means.index]
        speeds = {GAIN: means[SPEED], STEP_GAIN: means[TOKENS] / means[STEP_TIME]}
        return means.assign(**{name: speed / speed.reindex(baselines).to_numpy() for name, speed in speeds.items()})

    @cached_property
    def fields(self) -> pd.DataFrame:
        """The fields in which arms differ, by arm; NaN for an arm without a finished run, and in a section that it lacks."""
        arms = {arm: run.settings for (arm, _), run in self.finished.items()}
        rows = [{path: _text(value) for path, value in settings.items()} for settings in arms.values()]
        table = pd.DataFrame(rows, index=list(arms)).drop(columns=["name", "seed"], errors="ignore")
        return table.loc[:, table.nunique() > 1].reindex([arm["name"] for arm in self.about["arms"]])

    @property
    def seeds(self) -> pd.Series:
        """By arm, how many of its runs are finished: "1/2"."""
        outcomes = self.runs.groupby("arm", sort=False)["outcome"]
        return outcomes.agg(lambda ends: f"{sum(ends == 'finished')}/{len(ends)}")


def _compared(run: RunRecord) -> str:
    """A key that a run shares with its baseline, the run without speculation that its speeds are compared with."""
    return json.dumps({path: value for path, value in run.settings.items() if path.startswith(("seed", "policy."))})


def _text(value: Any) -> str:
    """A value of a configuration. A drafter that the study has made goes by its name in [inits]."""
    if isinstance(value, str):
        return re.sub(r".*/inits/(.+)/drafter", r"\1", value)
    return "none" if value is None else json.dumps(value)


def write_study_report(folder: Path) -> Path:
    """Write report.html, report.md, PNGs and table.csv into folder/report; returns report.md. Raises as `read_study`."""
    study = read_study(folder)
    title = f"{study.about['name']}, a cotrain study"
    page = write_page(folder / REPORT / "report.md", title, [*study_sections(study)])
    spreads = study.measured.groupby("arm").agg(["mean", "min", "max"])
    spreads.columns = [" ".join(names) for names in spreads.columns]
    study.fields.assign(seeds=study.seeds).join(spreads).rename_axis("name").to_csv(page.with_name("table.csv"))
    return page


def read_study(folder: Path) -> StudyRecord:
    """Read a study's folder. Raises ValueError naming study.json; a finished run that cannot be read is noted in `runs`."""
    about, finished = read_object(folder / STUDY), {}
    runs = [{"run": run["folder"], "arm": arm["name"]} | run for arm in about["arms"] for run in arm["runs"]]
    for run in runs:
        run["outcome"] = run["error"] or run["status"]
        if run["status"] == "finished":
            try:
                finished[run["arm"], run["seed"]] = read_run(folder / run["run"])
            except ValueError as error:
                run["outcome"] = f"finished, but {error}"
    return StudyRecord(about, pd.DataFrame(runs)[["run", "arm", "seed", "outcome"]], finished)


def comparison(study: StudyRecord) -> pd.DataFrame:
    """A row of text for each arm: the fields in which arms differ, and what it measured."""
    spreads = {name: study.measured[column].groupby("arm").agg(_spread) for name, column in COMPARED.items()}
    table = study.fields.assign(**spreads, seeds=study.seeds)
    return table.fillna(NONE).rename_axis("arm").reset_index()


def _spread(values: pd.Series) -> str:
    """Mean over seeds, with the lowest and the highest where they differ."""
    if values.isna().all():
        return NONE
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return f"{values.mean():.2f}" + (f" ({low}..{high})" if low != high else "")


def study_sections(study: StudyRecord) -> Iterator[Section]:
    """The page of a study; runs may be unfinished. A figure holds as many arms as can be told apart."""
    about, missing = study.about, int((study.runs["outcome"] != "finished").sum())
    if missing:
        yield Section("", f"**{missing} of {len(study.runs)} runs failed or are missing; they are in no number.**")
    yield Section("", f"arms: {len(about['arms'])}, seeds: {len(about['seeds'])}, steps of each run: {about['steps']}")
    yield Section("Comparison", HOW_TO_READ, comparison(study))
    drafting = study.measured[LENGTH].dropna().index.unique("arm")
    spreads = study.steps[LENGTH].groupby(["arm", "step"]).agg(["mean", "min", "max"])
    text = "Tokens a verification step emits: mean over seeds, and a band from the lowest seed to the highest."
    for first in range(0, len(drafting), MOST_LINES):
        arms = {name: spreads.loc[name] for name in drafting[first : first + MOST_LINES]}
        means = {name: spread["mean"] for name, spread in arms.items()}
        bands = {name: (spread["min"], spread["max"]) for name, spread in arms.items()}
        title = f"Acceptance length {1 + first // MOST_LINES}"
        yield line_section(title, "acceptance length", text, means, bands=bands, floor="1: no gain")
    yield Section("Runs", table=study.runs)
