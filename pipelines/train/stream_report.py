"""The part of a run's report about the stream: who was at work when, and how old what was trained on."""

from typing import Any

import pandas as pd

from pipelines.page.figures import timeline_figure
from pipelines.page.page import Plot, Section, line_plot
from pipelines.page.record import RunRecord

SHOWN_STEPS = 4
"""Last steps that the timeline shows: more would be too narrow to see."""

IDLE = "idle/"


def stream_section(run: RunRecord) -> list[Section]:
    """Nothing in a run that recorded no stream."""
    if not run.stream:
        return []
    metrics = run.metrics
    lag_columns = sorted(name for name in metrics.columns if name.startswith("stream/lag_tokens_"))
    tokens = metrics[lag_columns].fillna(0)
    shares = tokens.div(tokens.sum(axis="columns"), axis="index")
    plots = [
        _timeline(run.stream),
        line_plot(
            "lag", "Policy lag of the tokens trained on",
            {f"lag {name.rpartition('_')[2]}": shares[name] for name in lag_columns}, "share of the tokens",
            "Policy versions between the one that generated a token and the one that trained on it.",
        ),
        line_plot(
            "groups", "Groups under way",
            {state: run.column(f"stream/groups_{state}") for state in ("waiting", "running", "finished")}, "groups",
            "When a step begins: waiting for an engine, being generated, and finished but not trained on.",
        ),
        line_plot(
            "idle", "Idle time by role",
            {name.removeprefix(IDLE): metrics[name] for name in metrics.columns if name.startswith(IDLE)},
            "share of the step", "Share of each step in which a role had nothing to do. The least idle one is the bottleneck.",
        ),
    ]  # fmt: skip
    return [Section("Stream", plots=plots)]


def _timeline(events: list[dict[str, Any]]) -> Plot:
    last = max((row["step"] for row in events if row["event"] == "taken"), default=0)
    shown = [row for row in events if row["step"] > last - SHOWN_STEPS]
    start = min(row["time"] for row in shown)
    frame = pd.DataFrame(shown)
    frame["time"] -= start
    rows: dict[str, list[tuple[float, float]]] = {}
    finished = {row["group"]: row for row in frame[frame.event == "finished"].to_dict("records")}
    for row in frame[frame.event == "dispatched"].to_dict("records"):
        if end := finished.get(row["group"]):
            rows.setdefault(f"engine {int(row['engine'])}", []).append((row["time"], end["time"]))
    for event, label in (("policy updated", "policy learner"), ("drafter trained", "drafter trainer")):
        done = frame[frame.event == event]
        if len(done):
            rows[label] = [(max(0.0, t - s), t) for t, s in zip(done["time"], done["seconds"], strict=True)]
    swaps = {
        f"{what} swapped": frame[frame.event == f"{what} swapped"]["time"].tolist() for what in ("policy", "drafter")
    }
    text = f"The last {SHOWN_STEPS} steps. Bars of an engine are groups, darker where several are generated at once."
    return Plot("timeline", "Who is at work when", timeline_figure(rows, swaps), text)
