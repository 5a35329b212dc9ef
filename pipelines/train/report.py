"""What the report of a run shows: headline facts, curves, and what the run was made with."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from cotrain.run.console import duration
from pipelines.page.page import Fact, Page, Plot, Section, line_plot, write_page
from pipelines.page.record import RunRecord, drafter_age, drafter_marks, read_run

MOST_DECISIONS = 50
LEAST_SHARE = 0.005
"""Share of the run's time below which a stage is left out of the figure, where nobody could see it."""

STAGES = {
    "generate": "rollouts",
    "self_check": "feature check",
    "reward": "reward",
    "lossless": "check of losslessness",
    "learn": "policy and drafter training",
    "swap_policy": "policy swap",
}
DRAFTER, LONGEST = "drafter.model.type", "rollout.num_speculative_tokens"
SERVED, EXPECTED = "rollout/acceptance_length", "rollout/expected_acceptance_length"
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
    """Write report/report.html and its PNGs into the folder of a run; returns the page.

    Raises ValueError when the folder is no run, or has no metrics yet.
    """
    return write_page(folder, run_page(read_run(folder)))


def run_page(run: RunRecord) -> Page:
    """The page of a run with at least one step."""
    sections = [
        _speculation(run),
        *_decisions(run),
        Section("Policy", plots=[_curve(run, "reward"), _curve(run, "response_length")]),
        Section("Time", plots=[_stages(run), _curve(run, "tokens_per_s")]),
    ]
    if run.attempts:
        about = {"attempts": len(run.attempts)} | run.attempts[-1]
        sections.append(Section("What it ran on", table=_table(about), folded=True))
    return Page(
        title=run.settings["name"],
        kind="cotrain run",
        subtitle=_subtitle(run),
        facts=_facts(run),
        sections=[*sections, Section("Configuration", table=_table(run.settings), folded=True)],
    )


def _subtitle(run: RunRecord) -> str:
    get = run.settings.get
    parts = [get("policy.model"), get("task.name") or get("task.path"), f"seed {get('seed')}"]
    if drafter := get(DRAFTER):
        parts += [f"{drafter}, k = {get(LONGEST)}, {get('rollout.draft_sample_method')} drafts"]
    return ", ".join(str(part) for part in [*parts, *(attempt["date"][:10] for attempt in run.attempts[:1])] if part)


def _facts(run: RunRecord) -> list[Fact]:
    steps, tokens = run.metrics.index.size, run.column("rollout/generated_tokens").sum()
    speed = run.column("rollout/tokens_per_s").mean()
    facts = [
        _change(run, "Reward", "policy/reward", 3, "means of the first and the last third; higher is better"),
        _change(run, "Response length", "rollout/response_length", 3, "tokens; first and last third"),
        Fact("Time", duration(run.column("time/step_s").sum()), f"{steps} of {run.settings.get('steps')} steps"),
        Fact("Tokens generated", f"{tokens:,.0f}", f"{speed:,.0f} a second of generation" if speed > 0 else ""),
    ]
    if DRAFTER not in run.settings:
        return [*facts, Fact("Drafter", "none", "rollouts without speculation")]
    swaps, judged = int(run.column("drafter/published").sum()), run.column("gate/publish").count()
    how = "frozen" if run.settings.get("drafter.train") is False else "trained beside the policy"
    length = f"tokens a verification step; 1 is no gain, {1 + run.settings[LONGEST]} the most; first and last tenth"
    speedup = "times the speed of decoding, by step times measured in this run; first and last tenth"
    return [
        *facts,
        Fact("Drafter", how, f"{swaps} put into the running engine, {judged} candidates judged by the gate"),
        _change(run, "Acceptance length", SERVED, 10, length),
        _agreement(run),
        _change(run, "Against no speculation", SPEEDUP, 10, speedup),
    ]


def _change(run: RunRecord, label: str, metric: str, parts: int, note: str) -> Fact:
    """Means over the first and the last of `parts` equal parts of the measured values."""
    measured = run.column(metric).dropna()
    span = max(1, len(measured) // parts)
    first, last = measured[:span].mean(), measured[-span:].mean()
    return Fact(label, f"{first:.2f} -> {last:.2f}" if len(measured) else "not measured", note)


def _agreement(run: RunRecord) -> Fact:
    served, expected = run.column(SERVED), run.column(EXPECTED)
    both = served.notna() & expected.notna()
    if not both.any():
        return Fact("Expected against served", "not measured", "no step has both acceptance lengths")
    error = 100 * (expected[both].sum() / served[both].sum() - 1)
    note = f"of the served acceptance length, over {both.sum()} steps; + is too hopeful"
    return Fact("Expected against served", f"{error:+.1f} %", note)


def _speculation(run: RunRecord) -> Section:
    if DRAFTER not in run.settings:
        return Section("Speculation", ["This run has no drafter: its rollouts were generated without one."])
    plots = [
        line_plot(
            "acceptance_length", "Acceptance length, served and expected",
            {"served": run.column(SERVED), "expected on unseen rollouts": run.column(EXPECTED)},
            "acceptance length",
            "Tokens that a verification step of the engine emits, and what the trainer computed for the same drafter "
            "on the same rollouts before it was trained on them.",
            marks=drafter_marks(run), floor="1: no gain",
        ),
        line_plot(
            "acceptance_by_position", "Acceptance by draft position",
            {
                f"token {i}": run.column(f"rollout/acceptance_rate_pos_{i}")
                for i in range(1, 1 + run.settings[LONGEST])
            },
            "accepted share", "Share of verification steps that accepted all draft tokens up to this position.",
        ),
        _curve(run, "speedup"),
        line_plot(
            "drafter_lag", "Drafter lag",
            {"drafter that served": drafter_age(run), "features trained on": run.column("drafter/lag_versions")},
            "policy versions",
            "Policy versions since the served drafter was put into the engine, and mean age of the features in the "
            "trainer's batches.",
        ),
        _curve(run, "drafter_loss"),
    ]  # fmt: skip
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


def _decisions(run: RunRecord) -> list[Section]:
    """The newest events of the drafter; nothing in a run without any."""
    if not run.decisions:
        return []
    table = pd.DataFrame(run.decisions[-MOST_DECISIONS:])[["step", "kind", "version", "reason"]]
    table.columns = ["step", "decision", "drafter that serves next", "why"]
    return [Section("What was decided about the drafter", table=table)]


def _table(fields: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([(name, json.dumps(value)) for name, value in fields.items()], columns=["field", "value"])
