"""What the report of a study shows: arms over steps with their spread over seeds, the comparison table, what failed.

The numbers of an arm are means over the last third of the steps, averaged over seeds, with (lowest..highest).
"""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from pipelines.ablate import paper
from pipelines.ablate.study_costs import cost_sections
from pipelines.ablate.study_record import (
    GENERIC,
    IN_DOMAIN,
    Arm,
    ArmRecord,
    GapClosed,
    Spread,
    Study,
    acceptance_length,
    curve,
    gaps_closed,
    generation_speed,
    position_rates,
    read_study,
    reward,
    step_speed,
)
from pipelines.page.figures import Line, line_figure, range_figure
from pipelines.page.page import REPORT, Fact, Page, Plot, Section, Table, markdown_table, write_page

NONE = "-"
MEASURES = ("acceptance length", "tokens/s, x no speculation", "whole step, x no speculation", "reward")
COLUMNS = ("initialisation", "drafter", "k", "objective", "policy", *MEASURES, "seeds")

Group = tuple[str, int]
"""Policy and k: arms of one group can be compared on one scale."""


def write_study_report(folder: Path) -> Path:
    """Write report.html, its PNGs, table.md and table.csv into folder/report; returns the page.

    Raises ValueError when the folder is no study or its study.json is damaged. Arms that failed are named in it.
    """
    study = read_study(folder)
    path = write_page(folder, study_page(study))
    _replace(folder / REPORT / "table.md", markdown_table(comparison(study)))
    _replace(folder / REPORT / "table.csv", comparison_csv(study))
    return path


def study_page(study: Study) -> Page:
    """The page of a study; arms may be unfinished."""
    gaps = gaps_closed(study)
    drafting = [record for record in study.arms if record.arm.speculation and record.runs]
    groups = sorted(
        {(record.arm.policy, record.arm.draft_tokens) for record in drafting}, key=lambda g: (g[0] != "moving", g[1])
    )
    sections = [
        Section("Comparison", [_how_to_read(study)], [comparison(study)]),
        Section("Gap closed by co-training", _gap_sentences(gaps)),
        Section(
            "Acceptance length over steps",
            [] if drafting else ["No arm with a drafter has finished a run."],
            plots=[_curves(study, group, _of_group(drafting, group)) for group in groups],
        ),
        Section("Net gain", plots=[_gains(study, drafting)]),
        Section(
            "Acceptance by draft position",
            [] if drafting else ["No arm with a drafter has finished a run."],
            plots=[_positions(study, group, _of_group(drafting, group)) for group in groups],
        ),
        *cost_sections(study, drafting),
        *_problems(study),
        Section("Beside it: the published ablation", [paper.SETTING], [paper.TABLE]),
        Section("Runs", tables=[_runs(study)], folded=True),
    ]
    return Page(
        title=study.file.name,
        kind="cotrain study",
        subtitle=f"{_count(len(study.arms), 'arm')}, {_count(len(study.file.seeds), 'seed')}, "
        f"{_count(study.file.steps, 'step')} each",
        summary=_summary(study, drafting),
        facts=_facts(study, drafting, gaps),
        sections=sections,
    )


def comparison(study: Study) -> Table:
    """A row for each arm: initialisation x online x k x objective x policy, and what it measured."""
    rows = []
    for record in study.arms:
        measured = (str(value) if value else NONE for value in _measured(study, record))
        rows.append((*_identity(record.arm), *measured, f"{len(record.runs)}/{len(record.arm.runs)}"))
    return Table(COLUMNS, rows, numeric=(2, 5, 6, 7, 8, 9))


def comparison_csv(study: Study) -> str:
    """The same with mean, low and high of each measure in columns of their own, at full precision."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    spreads = [f"{name} {part}" for name in MEASURES for part in ("mean", "low", "high")]
    writer.writerow(["arm", *COLUMNS[:5], *spreads, "seeds finished", "seeds planned"])
    for record in study.arms:
        cells: list[object] = [record.arm.name, *("" if cell == NONE else cell for cell in _identity(record.arm))]
        for value in _measured(study, record):
            cells += [value.mean, value.low, value.high] if value else ["", "", ""]
        writer.writerow([*cells, len(record.runs), len(record.arm.runs)])
    return stream.getvalue()


def _identity(arm: Arm) -> tuple[str, ...]:
    if not arm.speculation:
        return (NONE, "no speculation", NONE, NONE, arm.policy)
    init = "none (random)" if arm.init == "none" else arm.init
    drafter = f"{arm.model} {'co-trained' if arm.online else 'frozen'}".lstrip()
    return (init, drafter, str(arm.draft_tokens), arm.objective, arm.policy)


def _measured(study: Study, record: ArmRecord) -> tuple[Spread | None, ...]:
    """In the order of MEASURES."""
    return (
        study.measure(record, acceptance_length) if record.arm.speculation else None,
        study.gain(record, generation_speed),
        study.gain(record, step_speed),
        study.measure(record, reward),
    )


def _how_to_read(study: Study) -> str:
    return (
        f"Means over the last third of the steps ({study.first_counted_step} to {study.file.steps}), then over seeds, "
        "with (lowest..highest). Acceptance length: tokens a verification step emits, 1 is no gain. Tokens/s of "
        "generation and of whole steps (drafter training and swaps included) are ratios to the no-speculation arm of "
        "the same policy and seed. The same table is in table.md and table.csv."
    )


def _summary(study: Study, drafting: Sequence[ArmRecord]) -> str:
    finished = sum(len(record.runs) for record in study.arms)
    planned = sum(len(record.arm.runs) for record in study.arms)
    text = f"{finished} of {_count(planned, 'run')} finished."
    best = [(value.mean, record) for record in drafting if (value := study.measure(record, acceptance_length))]
    if best:
        length, record = max(best, key=lambda pair: pair[0])
        text += (
            f" The longest acceptance length over the last third of the steps is {length:.2f} tokens a verification "
            f"step, by {record.arm.name} (k = {record.arm.draft_tokens})."
        )
    gains = [(value.mean, record) for record in drafting if (value := study.gain(record, generation_speed))]
    if gains:
        ratio, record = max(gains, key=lambda pair: pair[0])
        text += f" The fastest generation is {ratio:.2f} times that without speculation, by {record.arm.name}."
    return text


def _facts(study: Study, drafting: Sequence[ArmRecord], gaps: Sequence[GapClosed]) -> list[Fact]:
    facts = [
        Fact(
            f"Gap closed, {gap.online.policy} policy, k = {gap.online.draft_tokens}",
            _percent(gap.share),
            f"of generic to in-domain, by co-training with {gap.online.objective}",
        )
        for gap in gaps
        if gap.share
    ]
    missing = sum(len(record.problems) for record in study.arms)
    return [*facts, Fact("Runs that failed or are missing", str(missing), "listed below" if missing else "")]


def _gap_sentences(gaps: Sequence[GapClosed]) -> list[str]:
    if not gaps:
        return [
            f"Not computed: it needs a co-trained and a frozen arm of an initialisation called {GENERIC}, and a frozen "
            f"arm of one called {IN_DOMAIN}."
        ]
    sentences = []
    for gap in gaps:
        where = f"{gap.online.policy.capitalize()} policy, k = {gap.online.draft_tokens}, {gap.online.objective}"
        lengths = ""
        if gap.lengths:
            low, value, high = gap.lengths
            lengths = (
                f" Acceptance lengths: generic frozen {low:.2f}, co-trained {value:.2f}, in-domain frozen {high:.2f}."
            )
        if gap.share:
            closed = f"co-training the generic drafter closed {_percent(gap.share)} of its gap to the in-domain one"
            sentences.append(f"{where}: {closed}, over {_count(gap.share.num_seeds, 'seed')}.{lengths}")
        else:
            sentences.append(f"{where}: no share, since {gap.reason}.{lengths}")
    return sentences


def _percent(share: Spread | None) -> str:
    if share is None:
        return NONE
    text = f"{100 * share.mean:.0f}\u00a0%"
    return text + (f" ({100 * share.low:.0f}..{100 * share.high:.0f})" if share.num_seeds > 1 else "")


def _curves(study: Study, group: Group, records: Sequence[ArmRecord]) -> Plot:
    steps = range(1, study.file.steps + 1)
    lines = []
    for record in records:
        values = curve(study, record, "rollout/acceptance_length")
        low, high = (
            [value.low if value else None for value in values],
            [value.high if value else None for value in values],
        )
        line = Line(record.arm.name, steps, [value.mean if value else None for value in values], low, high)
        lines += [line] if line.measured else []
    name, title = f"acceptance_length_{_slug(group)}", _title(group)
    if not lines:
        return Plot(name, title, None, "No finished run of these arms measured an acceptance length.")
    ends = "; ".join(f"{line.label} from {line.measured[0]:.2f} to {line.measured[-1]:.2f}" for line in lines)
    return Plot(
        name, title,
        lambda width: line_figure(lines, "acceptance length", width, floor=(1.0, "1: no gain")),
        "Tokens a verification step emits: mean over seeds, and a band from the lowest seed to the highest.",
        f"Acceptance length over {_count(study.file.steps, 'step')} by arm: {ends}.", wide=True,
    )  # fmt: skip


def _positions(study: Study, group: Group, records: Sequence[ArmRecord]) -> Plot:
    lines = []
    for record in records:
        rates = position_rates(study, record)
        if rates:
            lines.append(Line(
                record.arm.name, range(1, len(rates) + 1), [rate.mean for rate in rates],
                [rate.low for rate in rates], [rate.high for rate in rates],
            ))  # fmt: skip
    name, title = f"acceptance_by_position_{_slug(group)}", _title(group)
    if not lines:
        return Plot(name, title, None, "No finished run of these arms measured acceptance by position.")
    described = "; ".join(f"{line.label} {', '.join(f'{rate:.2f}' for rate in line.measured)}" for line in lines)
    return Plot(
        name, title,
        lambda width: line_figure(lines, "accepted share", width, xlabel="draft position"),
        "Share of verification steps that accepted all draft tokens up to this position, over the last third.",
        f"Acceptance rates by draft position: {described}.",
    )  # fmt: skip


def _gains(study: Study, drafting: Sequence[ArmRecord]) -> Plot:
    name, title = "net_gain", "Generation speed against no speculation"
    gains = [(record, gain) for record in drafting if (gain := study.gain(record, generation_speed))]
    if not gains:
        return Plot(name, title, None, "No seed finished both an arm with a drafter and one without speculation.")
    labels = [record.arm.name for record, _ in gains]
    spreads = [(gain.mean, gain.low, gain.high) for _, gain in gains]
    return Plot(
        name, title,
        lambda width: range_figure(labels, spreads, "tokens/s, ratio to no speculation", 1.0, width),
        "Tokens/s of generation in the last third, as a ratio to the no-speculation arm of the same policy and seed; "
        "a bar from the lowest seed to the highest. Left of the dotted line, speculation costs time.",
        "Ratios: " + "; ".join(f"{label} {gain}" for label, (_, gain) in zip(labels, gains, strict=True)) + ".",
        wide=True,
    )  # fmt: skip


def _problems(study: Study) -> list[Section]:
    rows = [(record.arm.name, str(seed), text) for record in study.arms for seed, text in record.problems]
    if not rows:
        return []
    return [
        Section("Failed and missing runs", ["They are in no number above."], [Table(("arm", "seed", "error"), rows)])
    ]


def _runs(study: Study) -> Table:
    """Every run, linked to its own report where it has one."""
    rows, links = [], []
    for record in study.arms:
        for run in record.arm.runs:
            rows.append((run.folder, record.arm.name, str(run.seed), run.status))
            report = f"{run.folder}/{REPORT}/report.html"
            links.append(f"../{report}" if (study.folder / report).is_file() else None)
    return Table(("run", "arm", "seed", "status"), rows, links=links)


def _of_group(records: Sequence[ArmRecord], group: Group) -> list[ArmRecord]:
    return [record for record in records if (record.arm.policy, record.arm.draft_tokens) == group]


def _title(group: Group) -> str:
    return f"{group[0].capitalize()} policy, k = {group[1]}"


def _slug(group: Group) -> str:
    return f"{group[0]}_policy_k{group[1]}"


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
