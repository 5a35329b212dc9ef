"""What a run did: the facts that are printed at its end, and its report, which adds curves and the configuration."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cotrain.lossless.family import LEAST_SPECULATED
from cotrain.run.console import duration
from pipelines.page.figures import timeline_figure
from pipelines.page.page import Fact, Page, Plot, Section, line_plot, write_page
from pipelines.page.record import RunRecord, drafter_marks, read_run

MOST_DECISIONS = 12
LEAST_SHARE = 0.005
"""Share of the run's time below which a stage is left out of the figure, because nobody could see it there."""

STAGES = {
    "generate": "rollouts",
    "wait_for_rollouts": "waiting for rollouts",
    "self_check": "feature check",
    "lossless": "check of losslessness",
    "learn": "policy and drafter training",
    "swap_policy": "policy swap",
}
DRAFTER, LONGEST = "drafter.model.type", "rollout.num_speculative_tokens"
PROPOSERS = {"history": "from history", "drafter": "from the drafter"}
"""Prefixes of the metrics that count drafts by proposer."""

SERVED, EXPECTED = "rollout/acceptance_length", "rollout/expected_acceptance_length"
OF_DRAFTER = "rollout/acceptance_length_serving"
LEAST_GAIN, LEAST_STEPS = 0.02, 5
"""A drafter does not pay if the second half of a run, of LEAST_STEPS steps or more, gains a smaller share than this by it."""

SPEEDUP = "rollout/speedup_vs_no_speculation"
CURVES = {
    "reward": ("Reward", "policy/reward", "mean reward", "Mean reward of each step's rollouts."),
    "response_length": ("Response length", "rollout/response_length", "tokens", "Mean length of a step's responses."),
    "tokens_per_s": (
        "Generation speed", "rollout/tokens_per_s", "tokens/s",
        "Generated tokens per second of generation. It moves with response lengths as well as with acceptance.",
    ),
    "speedup": (
        "Speed against no speculation", SPEEDUP, "times as fast",
        "How many times faster the step's tokens were decoded than without speculation, by the measured times of "
        "engine steps. Prefilling of prompts is left out.",
    ),
    "drafter_loss": ("Drafter loss", "drafter/loss", "loss", "Mean training loss of each step."),
}  # fmt: skip
"""Figures of a single metric by name: title, metric, label of the axis, and how to read it."""


def write_run_report(folder: Path) -> Path:
    """Write report/report.html and its PNGs into the folder of a run; returns the page. Raises the ValueError of `read_run`."""
    return write_page(folder, run_page(read_run(folder)))


def run_page(run: RunRecord) -> Page:
    """The page of a run with at least one step."""
    sections = [_speculation(run)]
    if run.decisions:
        table = pd.DataFrame(run.decisions[-MOST_DECISIONS:])[["step", "kind", "version", "reason"]]
        table.columns = ["step", "decision", "drafter that serves next", "why"]
        earlier = len(run.decisions) - len(table)
        more = [f"{earlier} earlier decisions are in decisions.jsonl."] if earlier else []
        sections.append(Section("What was decided about the drafter", more, table))
    if not run.is_sidecar:  # a sidecar sees neither rewards nor what else its host does
        sections.append(Section("Policy", plots=[_curve(run, "reward"), _curve(run, "response_length")]))
        sections.append(Section("Time", plots=[_stages(run), _curve(run, "tokens_per_s")]))
        if run.stream:
            sections.append(_stream(run))
    if run.attempts:
        about = {"attempts": len(run.attempts)} | run.attempts[-1]
        sections.append(Section("What it ran on", table=_table(about), folded=True))
    return Page(
        title=run.settings["name"],
        kind="cotrain sidecar" if run.is_sidecar else "cotrain run",
        subtitle=_subtitle(run),
        facts=run_facts(run),
        sections=[*sections, Section("Configuration", table=_table(run.settings), folded=True)],
        warning=run.warning,
    )


def _subtitle(run: RunRecord) -> str:
    get = run.settings.get
    parts = [get("policy.model"), get("task.name") or get("task.path"), f"seed {get('seed')}"]
    if drafter := get(DRAFTER):
        frozen = "frozen " if get("drafter.train") is False else ""
        parts += [f"{frozen}{drafter}, k = {get(LONGEST)}, {get('rollout.draft_sample_method')} drafts"]
    parts += [progress(run), *(attempt["date"][:10] for attempt in run.attempts[:1])]
    return ", ".join(str(part) for part in parts if part)


def progress(run: RunRecord, planned: int | None = None) -> str:
    """Steps, time and tokens: "12 of 12 steps in 4m, 3,801 tokens generated".

    planned: steps that the run was to make, which a resume may have changed since config.json was written.
    """
    tokens = run.column("rollout/generated_tokens").sum()
    steps = f"{run.metrics.index.size}{f' of {planned}' if planned else ''} {'rounds' if run.is_sidecar else 'steps'}"
    return f"{steps} in {duration(run.column('time/step_s').sum())}, {tokens:,.0f} tokens generated"


def run_facts(run: RunRecord, speculation: str = "", greedy_identical: bool | None = None) -> list[Fact]:
    """What the run did, for a reader who has not seen a run before.

    Two things are known only at the end of a run and are not in its record: speculation, the draft lengths in use, and
    greedy_identical, whether greedy output was the same with and without speculation (None: not compared).
    """
    thirds = "(mean of the first and the last third; higher is better)"
    facts = [] if run.is_sidecar else [Fact("reward", _from_to(run, "policy/reward"), thirds)]
    facts += [Fact("left out", row["rows"]) for row in run.stream if row["event"] == "rows left out"][-1:]
    if not run.speculates:
        return facts
    # Weighted, because a step with a dozen verification steps says little.
    acceptance = _from_to(run, SERVED, "rollout/num_drafts")
    scale = f"(tokens per verification step; 1 is no gain, {1 + run.settings[LONGEST]} the most)"
    facts.append(Fact("acceptance", acceptance, scale))
    for name, proposer in PROPOSERS.items():
        drafted, accepted = (run.column(f"{name}/{kind}").sum() for kind in ("drafted_tokens", "accepted_tokens"))
        if drafted:
            share = f"{accepted:,.0f} of {drafted:,.0f} draft tokens accepted"
            facts.append(Fact(f"  {proposer}", share, f"({accepted / drafted:.0%})"))
    swaps = f"{run.column('drafter/published').sum():.0f} drafters put into the running engine"
    kept_back, taken_back = (run.column("gate/publish") == 0).sum(), run.column("drafter/rolled_back").sum()
    undone = [f"{kept_back} kept back by the gate"] if kept_back else []
    undone += [f"rolled back {'once' if taken_back == 1 else f'{taken_back:.0f} times'}"] if taken_back else []
    facts += [Fact("swaps", swaps, ", ".join(undone)), *_unpaid(run)] if DRAFTER in run.settings else []
    facts.append(_lossless(run, greedy_identical))
    if speculation:
        facts.append(Fact("speculation", speculation))
    if not run.column(SPEEDUP).any():
        return [*facts, Fact("speed", "not measured in this run", "`cotrain bench` measures it")]
    gain = f"decoding {_from_to(run, SPEEDUP)} times no speculation"
    return [*facts, Fact("speed", gain, "by step times measured in this run")]


def _unpaid(run: RunRecord) -> list[Fact]:
    """Suggest to freeze or drop a drafter whose drafts have gained next to nothing for long, by what was measured."""
    late = run.metrics.index[len(run.metrics) // 2 :]
    mixed, speed = run.column("history/tokens").any(), run.column(SPEEDUP)[late].mean()
    drafted = run.column("drafter/drafted_tokens" if mixed else "rollout/drafted_tokens")[late].sum()
    counted = run.column("drafter/accepted_tokens" if mixed else "rollout/num_drafts")[late]
    accepted = (counted if mixed else counted * (run.column(SERVED)[late] - 1)).sum()
    share = accepted / max(1, run.column("rollout/generated_tokens")[late].sum())
    by_speed = not mixed and speed == speed  # with history beside it, the speed is that of both
    judged = len(late) >= LEAST_STEPS and not run.is_sidecar and (by_speed or counted.notna().any())
    if not judged or (speed - 1 if by_speed else share) >= LEAST_GAIN:
        return []
    what = f"decoding {speed:.2f} times no speculation" if by_speed else f"{share:.1%} of the tokens come from it"
    value = (
        f"does not pay: {what}, {accepted:,.0f} of {drafted:,.0f} draft tokens accepted in the last {len(late)} steps"
    )
    trained = run.column("drafter/train_s").sum() / run.column("time/step_s").sum()
    freeze = f"training takes {trained:.0%} of the time, drafter.train=false freezes it; " if trained else ""
    return [Fact("drafter", value, f'({freeze}drafter="none" drops it)')]


def _lossless(run: RunRecord, greedy_identical: bool | None) -> Fact:
    """What was checked, and on how many tokens. Checks without speculated tokens do not count, unless they failed."""
    passed = run.column("lossless/passed").dropna()
    checks = "1 check" if passed.size == 1 else f"{passed.size} checks"
    value, notes = "not checked in this run", ["as lossless.every is 0"]
    if failed := (passed == 0).sum():
        value, notes = f"{failed} of {checks} FAILED", []
    elif speculated := run.column("lossless/speculated_tokens").sum():
        value = f"verified on {run.column('lossless/tokens').sum():,.0f} sampled tokens"
        notes = [f"{speculated:,.0f} of them speculated ({checks} in this run)"]
    elif run.settings.get("lossless.every") != 0:
        notes = [f"as no check held {LEAST_SPECULATED} speculated tokens (cotrain verify checks the engine)"]
    if greedy_identical is not None:
        same = "identical with and without speculation" if greedy_identical else "DIFFERS: please report this"
        notes.append(f"greedy output {same}")
    return Fact("lossless", value, "; ".join(notes))


def _from_to(run: RunRecord, metric: str, weight: str = "") -> str:
    """Means over the first and the last third of the steps that measured it; single steps scatter too much."""
    values = run.column(metric).dropna()
    if values.empty:
        return "not measured"
    weights, span = run.column(weight).fillna(1)[values.index], max(1, len(values) // 3)
    ends = (slice(span), slice(-span, None))
    return " -> ".join(f"{np.average(values.iloc[end], weights=weights.iloc[end]):.2f}" for end in ends)


def _speculation(run: RunRecord) -> Section:
    if not run.speculates:
        return Section("Speculation", ["This run has no drafter: its rollouts were generated without one."])
    columns = {name: run.column(f"{name}/accepted_tokens") / run.column(f"{name}/drafted_tokens") for name in PROPOSERS}
    by_proposer = {PROPOSERS[name]: column for name, column in columns.items() if column.any()}
    mixed = {"served by the drafter alone": run.column(OF_DRAFTER)} if run.column("history/tokens").any() else {}
    plots = [
        line_plot(
            "acceptance_length", "Acceptance length, served and expected",
            {"served": run.column(SERVED), **mixed, "expected on unseen rollouts": run.column(EXPECTED)},
            "acceptance length",
            "Tokens that a verification step of the engine emits, and what the trainer computed for the same drafter "
            "on the same rollouts before it was trained on them.",
            marks=drafter_marks(run), floor="1: no gain",
        ),
        line_plot(
            "acceptance_by_position", "Acceptance by draft position",
            {f"token {i}": run.column(f"rollout/acceptance_rate_pos_{i}") for i in range(1, 1 + run.settings[LONGEST])},
            "accepted share", "Share of verification steps that accepted all draft tokens up to this position.",
        ),
        _curve(run, "speedup"),
    ]  # fmt: skip
    if by_proposer:
        text = "Draft tokens of each proposer that were accepted. A request takes the one expected to give more."
        title = "Accepted share of the draft tokens, by proposer"
        plots.append(line_plot("acceptance_by_proposer", title, by_proposer, "accepted share", text))
    if DRAFTER in run.settings:
        plots.append(_curve(run, "drafter_loss"))
    return Section("Speculation", plots=plots)


def _curve(run: RunRecord, name: str) -> Plot:
    title, metric, ylabel, text = CURVES[name]
    return line_plot(name, title, {title: run.column(metric)}, ylabel, text)


def _stages(run: RunRecord) -> Plot:
    stages = pd.DataFrame({label: run.column(f"time/{stage}_s") for stage, label in STAGES.items()})
    stages["rest"] = (run.column("time/step_s") - stages.sum(axis="columns")).clip(lower=0.0)
    shares = stages.sum() / stages.sum().sum()
    shown = shares[shares > LEAST_SHARE]
    text = "Share of the run: " + ", ".join(f"{label} {100 * share:.0f} %" for label, share in shown.items()) + "."
    return line_plot("time_per_stage", "Time per stage", dict(stages[shown.index].items()), "seconds a step", text)


def _table(fields: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([(name, json.dumps(value)) for name, value in fields.items()], columns=["field", "value"])


SHOWN_STEPS = 4
"""Number of last steps in the timeline; with more, the bars would be too narrow to see."""

IDLE = "idle/"


def _stream(run: RunRecord) -> Section:
    metrics = run.metrics
    lag_columns = sorted(name for name in metrics.columns if name.startswith("stream/lag_tokens_"))
    tokens = metrics[lag_columns].fillna(0)
    shares = tokens.div(tokens.sum(axis="columns"), axis="index")
    lag = line_plot(
        "lag", "Policy lag of the tokens trained on",
        {f"lag {name.rpartition('_')[2]}": shares[name] for name in lag_columns}, "share of the tokens",
        "Policy versions between the one that generated a token and the one that trained on it.",
    )  # fmt: skip
    plots = [
        _timeline(run.stream),
        *([lag] if run.settings.get("stream.max_policy_lag") else []),  # a synchronous run has none
        line_plot(
            "idle", "Idle time by role",
            {name.removeprefix(IDLE): metrics[name] for name in metrics.columns if name.startswith(IDLE)},
            "share of the step", "Share of each step in which a role had nothing to do. The least idle one is the bottleneck.",
        ),
    ]  # fmt: skip
    return Section("Stream", plots=plots)


def _timeline(events: list[dict[str, Any]]) -> Plot:
    last = max((row["step"] for row in events if row["event"] == "taken"), default=0)
    frame = pd.DataFrame([row for row in events if row["step"] > last - SHOWN_STEPS])
    frame["time"] -= frame["time"].min()
    rows: dict[str, list[tuple[float, float]]] = {}
    finished = {row["group"]: row for row in frame[frame.event == "finished"].to_dict("records")}
    for row in frame[frame.event == "dispatched"].to_dict("records"):
        if end := finished.get(row["group"]):
            rows.setdefault(f"engine {int(row['engine'])}", []).append((row["time"], end["time"]))
    for event, label in (("policy updated", "policy learner"), ("drafter trained", "drafter trainer")):
        done = frame[frame.event == event]
        if len(done):
            rows[label] = [(max(0.0, t - s), t) for t, s in zip(done["time"], done["seconds"], strict=True)]
    swaps = {event: frame[frame.event == event]["time"].tolist() for event in ("policy swapped", "drafter swapped")}
    text = f"The last {SHOWN_STEPS} steps. Bars of an engine are groups, darker where several are generated at once."
    return Plot("timeline", "Who is at work when", timeline_figure(rows, swaps), text)
