"""What the report of a study shows: the comparison of its arms, their curves with the spread over seeds, what failed."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from drafters.files import read_object
from pipelines.page.figures import range_figure
from pipelines.page.folders import STUDY
from pipelines.page.page import NOT_MEASURED, REPORT, Fact, Page, Plot, Section, line_plot, write_page
from pipelines.page.record import read_run

NONE = "-"
LENGTH, SPEED, REWARD = "rollout/acceptance_length", "rollout/tokens_per_s", "policy/reward"
TOKENS, STEP_TIME = "rollout/generated_tokens", "time/step_s"
GAIN, STEP_GAIN = "tokens/s, x no speculation", "whole step, x no speculation"
COMPARED = {"acceptance length": LENGTH, GAIN: GAIN, STEP_GAIN: STEP_GAIN, "reward": REWARD}
"""Columns of the comparison, and what each shows."""

POSITION = "rollout/acceptance_rate_pos_"
HOW_TO_READ = (
    "Means over the last third of the steps, then over seeds, with (lowest..highest). Speeds are ratios to the "
    "no-speculation arm of the same policy and seed, and acceptance length 1 is no gain. table.csv has all metrics."
)


@dataclass(frozen=True)
class StudyRecord:
    """A study with the metrics of its finished runs."""

    about: dict[str, Any]
    """Name, number of steps and seeds."""
    arms: pd.DataFrame
    """What study.json says of each arm; the index is its name."""
    runs: pd.DataFrame
    """A row for each run: its folder, linked to its own report, arm, seed, and finished or why not."""
    steps: pd.DataFrame
    """The metrics of each finished run, by arm, seed and step."""

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Means over the last third of the steps, and two ratios of speeds, by arm and seed."""
        before = self.about["steps"] - max(1, self.about["steps"] // 3)
        counted = self.steps[self.steps.index.get_level_values("step") > before]
        means = counted.groupby(["arm", "seed"], sort=False).mean()
        speeds = {GAIN: means[SPEED], STEP_GAIN: means[TOKENS] / means[STEP_TIME]}
        return means.assign(**{name: self._gain(speed) for name, speed in speeds.items()})

    def _gain(self, speeds: pd.Series) -> pd.Series:
        """Ratio of each run to the no-speculation arm of the same policy and seed."""
        plain = {arm.policy: arm.Index for arm in self.arms.itertuples() if not arm.speculation}
        baselines = [(plain.get(self.arms["policy"][arm], NONE), seed) for arm, seed in speeds.index]
        return speeds / speeds.reindex(baselines).to_numpy()


def write_study_report(folder: Path) -> Path:
    """Write report.html, its PNGs, table.md and table.csv into folder/report; returns the page.

    Raises ValueError when the folder is no study or its study.json is damaged. Arms that failed are named in it.
    """
    study = read_study(folder)
    path, table = write_page(folder, study_page(study)), comparison(study)
    path.with_name("table.md").write_text(table.to_markdown(index=False, disable_numparse=True) + "\n")
    spreads = study.measured.groupby("arm").agg(["mean", "min", "max"])
    spreads.columns = [" ".join(names) for names in spreads.columns]
    study.arms.assign(seeds=table["seeds"].to_numpy()).join(spreads).to_csv(path.with_name("table.csv"))
    return path


def read_study(folder: Path) -> StudyRecord:
    """Raises ValueError naming study.json. The table of runs says which finished run cannot be read."""
    about, runs, tables = read_object(folder / STUDY), [], {}
    for arm in about["arms"]:
        for run in arm.pop("runs"):
            outcome = run["error"] or run["status"]
            if run["status"] == "finished":
                try:
                    tables[arm["name"], run["seed"]] = read_run(folder / run["folder"]).metrics
                except ValueError as error:
                    outcome = f"finished, but {error}"
            page = f"{run['folder']}/{REPORT}/report.html"
            link = Markup('<a href="../{}">{}</a>').format(page, run["folder"])
            runs.append((link if (folder / page).is_file() else run["folder"], arm["name"], run["seed"], outcome))
    columns = [LENGTH, SPEED, REWARD, TOKENS, STEP_TIME]
    nothing = pd.DataFrame(columns=columns, index=pd.Index([], name="step"), dtype=float)
    steps = pd.concat({(NONE, NONE): nothing} | tables, names=["arm", "seed"])
    # Links would become mere text in a column of pandas' own string type.
    shown = pd.DataFrame(runs, columns=["run", "arm", "seed", "outcome"], dtype=object)
    return StudyRecord(about, pd.DataFrame(about.pop("arms")).set_index("name"), shown, steps)


def comparison(study: StudyRecord) -> pd.DataFrame:
    """A row of text for each arm: initialisation x online x k x objective x policy, and what it measured."""
    arms, plain = study.arms, ~study.arms["speculation"]
    trained = arms["online"].map({True: " co-trained", False: " frozen"})
    table = pd.DataFrame(
        {
            "initialisation": arms["init"].mask(plain, NONE),
            "drafter": (arms.get("model", "") + trained).str.strip().mask(plain, "no speculation"),
            "k": arms["num_speculative_tokens"].astype(str).mask(plain, NONE),
            "objective": arms["objective"].mask(plain, NONE),
            "policy": arms["policy"],
        }
    )
    for name, column in COMPARED.items():
        table[name] = study.measured[column].groupby("arm").agg(_spread)
    finished = study.measured.groupby("arm").size().reindex(arms.index, fill_value=0)
    table["seeds"] = finished.astype(str) + f"/{len(study.about['seeds'])}"
    return table.fillna(NONE).rename_axis("arm").reset_index()


def _spread(values: pd.Series) -> str:
    """Mean over seeds, with the lowest and the highest where they differ."""
    if values.isna().all():
        return NONE
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return f"{values.mean():.2f}" + (f" ({low}..{high})" if low != high else "")


def study_page(study: StudyRecord) -> Page:
    """The page of a study; arms may be unfinished. Arms of one policy and k are compared with each other."""
    about, arms = study.about, study.arms
    unfinished = int((study.runs["outcome"] != "finished").sum())
    facts = [Fact("Runs that failed or are missing", f"{unfinished} of {len(study.runs)}", "they are in no number")]
    plots: list[Plot] = []
    for (policy, k), group in arms[arms["speculation"]].groupby(["policy", "num_speculative_tokens"], sort=False):
        plots += _group_plots(study, group, policy, k)
    return Page(
        title=about["name"],
        kind="cotrain study",
        subtitle=f"arms: {len(arms)}, seeds: {len(about['seeds'])}, steps of each run: {about['steps']}",
        facts=facts,
        sections=[
            Section("Comparison", [HOW_TO_READ], comparison(study)),
            Section("Acceptance and speed", plots=[*plots, _gain_plot(study.measured[GAIN])]),
            Section("Runs", table=study.runs, folded=not unfinished),
        ],
    )


def _group_plots(study: StudyRecord, arms: pd.DataFrame, policy: str, k: int) -> list[Plot]:
    slug, title = f"{policy}_policy_k{k}", f"{policy} policy, k = {k}"
    spreads = study.steps[LENGTH].groupby(["arm", "step"]).agg(["mean", "min", "max"])
    finished = {name: spreads.loc[name] for name in study.measured.index.unique("arm") if name in arms.index}
    positions = study.measured.reindex(columns=[f"{POSITION}{i}" for i in range(1, k + 1)]).groupby("arm").mean()
    positions.columns = range(1, k + 1)
    return [
        line_plot(
            f"acceptance_length_{slug}", f"Acceptance length, {title}",
            {name: spread["mean"] for name, spread in finished.items()}, "acceptance length",
            "Tokens a verification step emits: mean over seeds, and a band from the lowest seed to the highest.",
            bands={name: (spread["min"], spread["max"]) for name, spread in finished.items()}, floor="1: no gain",
        ),
        line_plot(
            f"acceptance_by_position_{slug}", f"Acceptance by draft position, {title}",
            {name: positions.loc[name] for name in finished}, "accepted share",
            "Share of verification steps that accepted all draft tokens up to this position, over the last third.",
            xlabel="draft position",
        ),
    ]  # fmt: skip


def _gain_plot(gains_by_run: pd.Series) -> Plot:
    title = "Generation speed against no speculation"
    gains = gains_by_run.groupby("arm", sort=False).agg(["mean", "min", "max"]).dropna()
    if gains.empty:
        return Plot("net_gain", title, None, NOT_MEASURED)
    text = "A dot at the mean over seeds, a bar from the lowest seed to the highest. Below 1, speculation costs time."
    return Plot("net_gain", title, range_figure(gains, "tokens/s, ratio to no speculation"), text, gains.to_string())
