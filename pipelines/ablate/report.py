"""What the report of a study shows: the comparison of its arms, their curves with the spread over seeds, what failed.

The numbers of an arm are means over the last third of the steps, then over seeds, with (lowest..highest).
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from pipelines.ablate.record import Arm, StudyRecord, read_record
from pipelines.page.figures import range_figure
from pipelines.page.page import NOT_MEASURED, REPORT, Fact, Page, Plot, Section, line_plot, write_page
from pipelines.page.record import read_run

NONE = "-"
GENERIC, IN_DOMAIN = "generic", "in-domain"
"""Initialisations whose gap co-training is measured against."""

LENGTH, REWARD = "acceptance length", "reward"
GAIN, STEP_GAIN = "tokens/s, x no speculation", "whole step, x no speculation"
COMPARED = [LENGTH, GAIN, STEP_GAIN, REWARD]
MEANS = {
    LENGTH: "rollout/acceptance_length",
    REWARD: "policy/reward",
    "tokens/s": "rollout/tokens_per_s",
    "training, s a step": "drafter/train_s",
    "trained tokens/s": "drafter/tokens_per_s",
    "swap, bytes": "drafter/swap_bytes",
    "swap, s": "drafter/swap_s",
    "features, bytes a token": "rollout/feature_bytes_per_token",
    "tap, share of generation": "rollout/tap_overhead",
}
"""What is measured of an arm, and the metric whose mean it is."""

HOW_TO_READ = (
    "Means over the last third of the steps, then over seeds, with (lowest..highest). Acceptance length: tokens that a "
    "verification step emits, 1 is no gain. The speeds of generation and of whole steps (drafter training and swaps "
    "included) are ratios to the no-speculation arm of the same policy and seed. table.csv also has what training and "
    "swaps cost."
)


@dataclass(frozen=True)
class Study:
    """A study with the metrics of its finished runs."""

    record: StudyRecord
    steps: pd.DataFrame
    """A row for each step of each run: arm, seed, step and metrics."""
    runs: pd.DataFrame
    """A row for each run: its folder, arm, seed, and finished or why not."""


def write_study_report(folder: Path) -> Path:
    """Write report.html, its PNGs, table.md and table.csv into folder/report; returns the page.

    Raises ValueError when the folder is no study or its study.json is damaged. Arms that failed are named in it.
    """
    study = read_study(folder)
    measured = measures(study)
    path = write_page(folder, study_page(study))
    table = comparison(study, measured)
    path.with_name("table.md").write_text(table.to_markdown(index=False, disable_numparse=True) + "\n")
    arms = pd.DataFrame([arm.model_dump(exclude={"runs"}) for arm in study.record.arms]).assign(seeds=table["seeds"])
    spreads = measured.groupby("arm", sort=False).agg(["mean", "min", "max"])
    spreads.columns = [" ".join(names) for names in spreads.columns]
    arms.merge(spreads, how="left", left_on="name", right_index=True).to_csv(path.with_name("table.csv"), index=False)
    return path


def read_study(folder: Path) -> Study:
    """Raises ValueError naming study.json. A finished run that cannot be read is told so in the table of runs."""
    record = read_record(folder)
    tables, runs = list[pd.DataFrame](), []
    for arm in record.arms:
        for run in arm.runs:
            outcome = run.error or run.status
            if run.status == "finished":
                try:
                    metrics = read_run(folder / run.folder).metrics.reset_index()
                    tables.append(metrics.assign(arm=arm.name, seed=run.seed))
                except ValueError as error:
                    outcome = f"finished, but {error}"
            runs.append((_linked(folder, run.folder), arm.name, run.seed, outcome))
    steps = pd.concat(tables or [pd.DataFrame(columns=["arm", "seed", "step"])], ignore_index=True)
    # Links would become mere text in a column of pandas' own string type.
    return Study(record, steps, pd.DataFrame(runs, columns=["run", "arm", "seed", "outcome"], dtype=object))


def _linked(folder: Path, run: str) -> str:
    """The folder of a run, as a link to its own report where it has one."""
    page = f"{run}/{REPORT}/report.html"
    return Markup('<a href="../{}">{}</a>').format(page, run) if (folder / page).is_file() else run


def measures(study: Study) -> pd.DataFrame:
    """A row for each finished run, by arm and seed, with a column for each measure over the last third of the steps."""
    longest = max((arm.num_speculative_tokens for arm in study.record.arms), default=0)
    means = MEANS | {f"accepted at {i}": f"rollout/acceptance_rate_pos_{i}" for i in range(1, longest + 1)}
    columns = ["arm", "seed", "step", "rollout/generated_tokens", "time/step_s", *means.values()]
    counted = study.steps.reindex(columns=columns)
    counted = counted[counted["step"] > study.record.steps - max(1, study.record.steps // 3)]
    runs = counted.groupby(["arm", "seed"], sort=False)
    table = pd.DataFrame({name: runs[metric].mean() for name, metric in means.items()})
    whole = runs["rollout/generated_tokens"].sum(min_count=1) / runs["time/step_s"].sum(min_count=1)
    table[GAIN], table[STEP_GAIN] = _gain(study, table["tokens/s"]), _gain(study, whole)
    return table


def _gain(study: Study, speeds: pd.Series) -> pd.Series:
    """Ratio of each run to the no-speculation arm of the same policy and seed."""
    policies = {arm.name: arm.policy for arm in study.record.arms}
    plain = {arm.policy: arm.name for arm in study.record.arms if not arm.speculation}
    known = speeds.to_dict()
    baselines = [known.get((plain.get(policies[arm]), seed), float("nan")) for arm, seed in known]
    return speeds / pd.Series(baselines, index=speeds.index, dtype=float)


def comparison(study: Study, measured: pd.DataFrame) -> pd.DataFrame:
    """A row of text for each arm: initialisation x online x k x objective x policy, and what it measured."""
    rows = []
    for arm in study.record.arms:
        drafter = f"{arm.model} {'co-trained' if arm.online else 'frozen'}".lstrip()
        row = {
            "initialisation": arm.init,
            "drafter": drafter,
            "k": str(arm.num_speculative_tokens),
            "objective": arm.objective,
        }
        if not arm.speculation:
            row = dict.fromkeys(row, NONE) | {"drafter": "no speculation"}
        row = {"arm": arm.name} | row | {"policy": arm.policy}
        own = measured[measured.index.get_level_values("arm") == arm.name]
        row |= {name: _spread(own[name]) for name in COMPARED}
        rows.append(row | {"seeds": f"{len(own)}/{len(arm.runs)}"})
    return pd.DataFrame(rows)


def _spread(values: pd.Series) -> str:
    """Mean over seeds, with the lowest and the highest where they differ."""
    if values.isna().all():
        return NONE
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return f"{values.mean():.2f}" + (f" ({low}..{high})" if low != high else "")


def study_page(study: Study) -> Page:
    """The page of a study; arms may be unfinished."""
    record, measured = study.record, measures(study)
    unfinished = int((study.runs["outcome"] != "finished").sum())
    gaps = [_gap_closed(study, arm, measured) for arm in record.arms if arm.init == GENERIC and arm.online]
    return Page(
        title=record.name,
        kind="cotrain study",
        subtitle=f"arms: {len(record.arms)}, seeds: {len(record.seeds)}, steps of each run: {record.steps}",
        facts=[
            Fact("Runs that failed or are missing", f"{unfinished} of {len(study.runs)}", "they are in no number"),
            *gaps,
        ],
        sections=[
            Section("Comparison", [HOW_TO_READ], comparison(study, measured)),
            Section("Acceptance and speed", plots=[*_group_plots(study, measured), _gain_plot(measured)]),
            Section("Runs", table=study.runs, folded=not unfinished),
        ],
    )


def _gap_closed(study: Study, online: Arm, measured: pd.DataFrame) -> Fact:
    """(generic co-trained - generic frozen) / (in-domain frozen - generic frozen), over seeds that have all three."""
    label = f"Gap closed, {online.policy} policy, k = {online.num_speculative_tokens}, {online.objective}"
    frozen = {
        arm.init: arm.name
        for arm in study.record.arms
        if arm.speculation
        and not arm.online
        and (arm.policy, arm.num_speculative_tokens) == (online.policy, online.num_speculative_tokens)
    }
    if missing := [init for init in (GENERIC, IN_DOMAIN) if init not in frozen]:
        return Fact(label, NONE, f"the study has no frozen {missing[0]} arm to compare with")
    lengths = (
        measured[LENGTH].unstack("arm").reindex(columns=[frozen[GENERIC], online.name, frozen[IN_DOMAIN]]).dropna()
    )
    lengths.columns = ["low", "value", "high"]
    if lengths.empty:
        return Fact(label, NONE, "no seed has finished all three arms")
    gap, mean = lengths["high"] - lengths["low"], lengths.mean()
    note = "acceptance length {:.2f} generic frozen, {:.2f} co-trained, {:.2f} in-domain".format(*mean)
    if (gap <= 0).any():
        return Fact(label, NONE, f"there is no gap to close for every seed: {note}")
    shares = 100 * (lengths["value"] - lengths["low"]) / gap
    # The mean is a ratio of means: a seed with a small gap would outweigh the others in a mean of ratios.
    share = 100 * (mean["value"] - mean["low"]) / (mean["high"] - mean["low"])
    return Fact(label, f"{share:.0f} % ({shares.min():.0f}..{shares.max():.0f})", f"{note}; {len(shares)} seeds")


def _group_plots(study: Study, measured: pd.DataFrame) -> list[Plot]:
    """Arms of one policy and k are compared on one scale."""
    groups: dict[tuple[str, int], list[str]] = {}
    for arm in study.record.arms:
        if arm.speculation:
            groups.setdefault((arm.policy, arm.num_speculative_tokens), []).append(arm.name)
    means = measured.groupby("arm").mean()
    curves = study.steps.reindex(columns=["arm", "step", MEANS[LENGTH]]).groupby(["arm", "step"])[MEANS[LENGTH]]
    spreads = curves.agg(["mean", "min", "max"])
    plots = []
    for (policy, k), names in groups.items():
        finished = {name: spreads.loc[name] for name in names if name in means.index}
        slug, title = f"{policy}_policy_k{k}", f"{policy} policy, k = {k}"
        positions = {
            name: pd.Series({i: means[f"accepted at {i}"][name] for i in range(1, k + 1)}) for name in finished
        }
        plots += [
            line_plot(
                f"acceptance_length_{slug}", f"Acceptance length, {title}",
                {name: spread["mean"] for name, spread in finished.items()}, "acceptance length",
                "Tokens a verification step emits: mean over seeds, and a band from the lowest seed to the highest.",
                bands={name: (spread["min"], spread["max"]) for name, spread in finished.items()}, floor="1: no gain",
            ),
            line_plot(
                f"acceptance_by_position_{slug}", f"Acceptance by draft position, {title}", positions, "accepted share",
                "Share of verification steps that accepted all draft tokens up to this position, over the last third.",
                xlabel="draft position",
            ),
        ]  # fmt: skip
    return plots


def _gain_plot(measured: pd.DataFrame) -> Plot:
    title = "Generation speed against no speculation"
    gains = measured[GAIN].groupby("arm", sort=False).agg(["mean", "min", "max"]).dropna()
    if gains.empty:
        return Plot("net_gain", title, None, NOT_MEASURED)
    text = "A dot at the mean over seeds, a bar from the lowest seed to the highest. Below 1, speculation costs time."
    return Plot("net_gain", title, range_figure(gains, "tokens/s, ratio to no speculation"), text, gains.to_string())
