"""What the report of a run shows: headline facts, curves, and what the run was made with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from cotrain.run.console import duration
from pipelines.page.page import Fact, Page, Plot, Section, line_plot, write_page
from pipelines.page.record import RunRecord, drafter_age, drafter_marks, from_to, read_run

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
SPEEDUP = "rollout/speedup_vs_no_speculation"


def write_run_report(folder: Path) -> Path:
    """Write report/report.html and its PNGs into the folder of a run; returns the page.

    Raises ValueError when the folder is no run, or has no metrics yet.
    """
    return write_page(folder, run_page(read_run(folder)))


def run_page(run: RunRecord) -> Page:
    """The page of a run with at least one step."""
    speculation = Section("Speculation", ["This run has no drafter: its rollouts were generated without one."])
    if run.setting("drafter"):
        speculation = Section("Speculation", plots=_speculation(run))
    shown = [run.setting(name) for name in ("policy.model", "task.name", "task.path", "drafter.model.type")]
    return Page(
        title=run.name,
        kind="cotrain run",
        subtitle=", ".join([*filter(None, shown), f"seed {run.setting('seed')}"]),
        facts=_facts(run),
        sections=[
            speculation,
            *_decisions(run),
            Section("Policy", plots=_policy(run)),
            Section("Time", plots=_time(run)),
            *_provenance(run),
            Section("Configuration", table=_table(run.config), folded=True),
        ],
    )


def _facts(run: RunRecord) -> list[Fact]:
    steps, tokens = run.metrics.index.size, run.column("rollout/generated_tokens").sum()
    speed = run.column("rollout/tokens_per_s").mean()
    facts = [
        _change(run, "Reward", "policy/reward", 3, "means of the first and the last third; higher is better"),
        _change(run, "Response length", "rollout/response_length", 3, "tokens; first and last third"),
        Fact("Time", duration(run.column("time/step_s").sum()), f"{steps} of {run.setting('steps')} steps"),
        Fact("Tokens generated", f"{tokens:,.0f}", f"{speed:,.0f} a second of generation" if speed > 0 else ""),
    ]
    if not run.setting("drafter"):
        return [*facts, Fact("Drafter", "none", "rollouts without speculation")]
    swaps, judged = int(run.column("drafter/published").sum()), run.column("gate/publish").count()
    how = "frozen" if run.setting("drafter.train") is False else "trained beside the policy"
    note = f"{swaps} put into the running engine, {judged} candidates judged by the gate"
    length = f"tokens a verification step; 1 is no gain, {1 + _draft_length(run)} the most; first and last tenth"
    speedup = "times the speed of decoding, by step times measured in this run; first and last tenth"
    return [
        *facts,
        Fact("Drafter", how, note),
        _change(run, "Acceptance length", "rollout/acceptance_length", 10, length),
        _change(run, "Against no speculation", SPEEDUP, 10, speedup),
    ]


def _change(run: RunRecord, label: str, metric: str, parts: int, note: str) -> Fact:
    found = from_to(run.column(metric), parts)
    return Fact(label, f"{found[0]:.2f} -> {found[1]:.2f}" if found else "not measured", note)


def _draft_length(run: RunRecord) -> int:
    return int(run.setting("rollout.num_speculative_tokens") or 0)


def _curve(run: RunRecord, name: str, title: str, lines: Mapping[str, str], ylabel: str, text: str) -> Plot:
    """A figure of some metrics, which are named by the labels of their lines."""
    return line_plot(name, title, {label: run.column(metric) for label, metric in lines.items()}, ylabel, text)


def _speculation(run: RunRecord) -> list[Plot]:
    by_position = {f"token {i + 1}": f"rollout/acceptance_rate_pos_{i + 1}" for i in range(_draft_length(run))}
    served, expected = run.column("rollout/acceptance_length"), run.column("rollout/expected_acceptance_length")
    ages = {"drafter that served": drafter_age(run), "features trained on": run.column("drafter/lag_versions")}
    return [
        line_plot(
            "acceptance_length", "Acceptance length, served and expected",
            {"served": served, "expected on unseen rollouts": expected}, "acceptance length",
            "Tokens that a verification step of the engine emits, and what the trainer computed for the same drafter "
            "on the same rollouts before it was trained on them.",
            marks=drafter_marks(run), floor="1: no gain",
        ),
        _curve(
            run, "acceptance_by_position", "Acceptance by draft position", by_position, "accepted share",
            "Share of verification steps that accepted all draft tokens up to this position.",
        ),
        _curve(
            run, "speedup", "Speed against no speculation", {"speed": SPEEDUP}, "times as fast",
            "How many times faster the step's tokens were decoded than without speculation, by the measured times of "
            "engine steps. Prefilling of prompts is left out.",
        ),
        line_plot(
            "drafter_lag", "Drafter lag", ages, "policy versions",
            "Policy versions since the served drafter was put into the engine, and mean age of the features in the "
            "trainer's batches.",
        ),
        _curve(
            run, "drafter_loss", "Drafter loss", {"loss": "drafter/loss"}, "loss", "Mean training loss of each step."
        ),
    ]  # fmt: skip


def _policy(run: RunRecord) -> list[Plot]:
    reward, length = {"reward": "policy/reward"}, {"response length": "rollout/response_length"}
    return [
        _curve(run, "reward", "Reward", reward, "mean reward", "Mean reward of each step's rollouts."),
        _curve(run, "response_length", "Response length", length, "tokens", "Mean length of a step's responses."),
    ]


def _time(run: RunRecord) -> list[Plot]:
    text = "Generated tokens per second of generation. It moves with response lengths as well as with acceptance."
    speed = {"tokens/s": "rollout/tokens_per_s"}
    return [_stages(run), _curve(run, "tokens_per_s", "Generation speed", speed, "tokens/s", text)]


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


def _provenance(run: RunRecord) -> list[Section]:
    """Code, packages and machine of the last attempt; nothing when they were not recorded."""
    if not run.attempts:
        return []
    return [Section("What it ran on", table=_table({"attempts": len(run.attempts)} | run.attempts[-1]), folded=True)]


def _table(fields: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([(name, json.dumps(value)) for name, value in fields.items()], columns=["field", "value"])
