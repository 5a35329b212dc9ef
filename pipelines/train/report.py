"""What the report of a run shows: headline facts in words, curves, and what the run was made with."""

import json
from pathlib import Path
from typing import Any

from cotrain.run.console import duration
from pipelines.page.figures import Line, line_figure, stacked_figure
from pipelines.page.page import Fact, Page, Plot, Section, Table, write_page
from pipelines.page.record import RunRecord, expected_of_served, from_to, marked, mean, read_run, served_lag, total

NOT_MEASURED = "not measured"
MOST_DECISIONS = 50
STAGES = {
    "generate": "rollouts",
    "self_check": "feature check",
    "reward": "reward",
    "lossless": "check of losslessness",
    "learn": "policy and drafter training",
    "swap_policy": "policy swap",
    "swap_drafter": "drafter swap",
}

SPEEDUP = "rollout/speedup_vs_no_speculation"


def write_run_report(folder: Path) -> Path:
    """Write report/report.html and its PNGs into the folder of a run; returns the page.

    Raises ValueError when the folder is no run, or has no metrics yet.
    """
    run = read_run(folder)
    return write_page(folder, run_page(run))


def run_page(run: RunRecord) -> Page:
    """The page of a run with at least one step."""
    drafter = run.setting("drafter")
    speculation = [_acceptance(run), _positions(run), _speedup(run), _lag(run), _drafter_loss(run)] if drafter else []
    policy = [
        _curve(run, "reward", "Reward", "policy/reward", "mean reward", "Mean reward of each step's rollouts."),
        _curve(run, "response_length", "Response length", "rollout/response_length", "tokens",
               "Mean length of each step's responses, in tokens."),
    ]  # fmt: skip
    time = [
        _stages(run),
        _curve(run, "tokens_per_s", "Generation speed", "rollout/tokens_per_s", "tokens/s",
               "Generated tokens per second of generation. It moves with response lengths as well as with acceptance."),
    ]  # fmt: skip
    return Page(
        title=run.name,
        kind="cotrain run",
        subtitle=_subtitle(run),
        summary=_summary(run),
        facts=_facts(run),
        sections=[
            Section("Speculation", plots=speculation)
            if drafter
            else Section("Speculation", ["This run has no drafter: its rollouts were generated without speculation."]),
            *([Section("What was decided about the drafter", tables=[_decisions(run)])] if run.decisions else []),
            Section("Policy", plots=policy),
            Section("Time", plots=time),
            *_provenance(run),
            Section("Configuration", tables=[_settings(run)], folded=True),
        ],
    )


def _subtitle(run: RunRecord) -> str:
    parts = [str(run.setting("policy.model") or "unknown policy"), _task(run)]
    if run.setting("drafter"):
        k, method = run.setting("rollout.draft_tokens"), run.setting("rollout.draft_sample_method")
        parts.append(f"{run.setting('drafter.model.type') or 'drafter'}, k = {k}, {method} drafting")
    parts.append(f"temperature {run.setting('rollout.temperature')}, seed {run.setting('seed')}")
    if run.attempts and (date := run.attempts[0].get("date")):
        parts.append(str(date)[:10])
    return ", ".join(part for part in parts if part)


def _task(run: RunRecord) -> str:
    return str(run.setting("task.name") or run.setting("task.path") or "")


def _summary(run: RunRecord) -> str:
    """Two or three sentences for somebody who reads nothing else."""
    planned = run.setting("steps") or len(run.rows)
    trained = "was kept as it is for" if run.setting("policy.train") is False else "was trained for"
    text = f"The policy {trained} {len(run.rows)} of {planned} {_plural('step', planned)}"
    if reward := from_to(run.column("policy/reward"), 3):
        changed = f"went from {reward[0]:.2f} to {reward[1]:.2f}" if len(run.rows) > 1 else f"was {reward[0]:.2f}"
        text += f", and its mean reward {changed}"
    text += "."
    if not run.setting("drafter"):
        return f"{text} There was no drafter."
    how = "stayed frozen" if run.setting("drafter.train") is False else "was trained beside it"
    text += f" The drafter {how}"
    if length := from_to(run.column("rollout/acceptance_length"), 10):
        changed = f"{length[0]:.2f} tokens"
        changed += f" at the start and {length[1]:.2f} at the end" if len(run.rows) > 1 else ""
        text += f": a verification step of the engine emitted {changed}, where 1 is no gain and {_most(run)} the most"
    else:
        text += "; its acceptance length was not measured"
    return text + "."


def _facts(run: RunRecord) -> list[Fact]:
    seconds, tokens = run.column("time/step_s"), total(run.column("rollout/generated_tokens"))
    facts = [
        _from_to(run, "Reward", "policy/reward", 3, "means of the first and the last third; higher is better"),
        _from_to(run, "Response length", "rollout/response_length", 3, "tokens; first and last third"),
        Fact("Time", duration(total(seconds)) if mean(seconds) else NOT_MEASURED, _steps(run)),
        Fact("Tokens generated", f"{tokens:,.0f}" if tokens else NOT_MEASURED, _speed(run)),
    ]
    if not run.setting("drafter"):
        return [*facts, Fact("Drafter", "none", "rollouts without speculation")]
    swaps = sum(bool(value) for value in run.column("drafter/published"))
    length = _from_to(
        run, "Acceptance length", "rollout/acceptance_length", 10,
        f"tokens a verification step; 1 is no gain, {_most(run)} the most; first and last tenth",
    )  # fmt: skip
    gain = _from_to(
        run, "Against no speculation", SPEEDUP, 10, "times the speed of decoding, by step times measured in this run"
    )
    if gain.value == NOT_MEASURED:
        gain = Fact(gain.label, gain.value, "cotrain bench or a study with a no-speculation arm measures it")
    facts.insert(1, length)
    return [*facts, Fact("Drafter swaps", str(swaps), _swap_note(run)), _agreement(run), gain]


def _swap_note(run: RunRecord) -> str:
    """How many of the swaps can be chance: the gate's confidence holds for each candidate, not for the run."""
    note = "drafters put into the running engine"
    judged, confidence = (
        sum(v is not None for v in run.column("gate/lower_bound")),
        run.setting("drafter.gate.confidence"),
    )
    if not judged or confidence is None or run.setting("drafter.gate.publish_when") == "always":
        return note
    return (
        f"{note}; {judged} judged, of which chance alone publishes {(1 - confidence) * judged:.1f} at most on average"
    )


def _from_to(run: RunRecord, label: str, metric: str, parts: int, note: str) -> Fact:
    found = from_to(run.column(metric), parts)
    if found is None:
        return Fact(label, NOT_MEASURED, note)
    decimals = 0 if metric == "rollout/response_length" else 2
    text = f"{found[0]:.{decimals}f}"
    return Fact(label, text if len(run.rows) == 1 else f"{text} -> {found[1]:.{decimals}f}", note)


def _steps(run: RunRecord) -> str:
    return f"{len(run.rows)} {_plural('step', len(run.rows))}"


def _speed(run: RunRecord) -> str:
    speed = mean(run.column("rollout/tokens_per_s"))
    return "" if speed is None else f"{speed:,.0f} a second of generation"


def _agreement(run: RunRecord) -> Fact:
    label = "Expected against served"
    pairs = [
        (expected, served)
        for expected, served in zip(expected_of_served(run.rows), run.column("rollout/acceptance_length"), strict=True)
        if expected is not None and served is not None
    ]
    if not pairs:
        return Fact(label, NOT_MEASURED, "no step has both for the same drafter")
    error = 100 * (sum(expected for expected, _ in pairs) / sum(served for _, served in pairs) - 1)
    return Fact(
        label,
        f"{error:+.1f}\u00a0%",
        f"of the served length; mean of {len(pairs)} {_plural('step', len(pairs))}, + is too hopeful",
    )


def _acceptance(run: RunRecord) -> Plot:
    name, title = "acceptance_length", "Acceptance length, served and expected"
    served, expected = run.column("rollout/acceptance_length"), expected_of_served(run.rows)
    lines = [Line("served", run.steps, served), Line("expected on unseen rollouts", run.steps, expected)]
    if not lines[0].measured:
        return Plot(name, title, None, "No step of this run measured an acceptance length.")
    lines = [line for line in lines if line.measured]
    marks = marked(run.rows)
    num_swaps = len(marks["first step of a new drafter"])
    text = "Tokens a verification step of the engine emits, as served."
    if len(lines) == 2:
        text += " Expected: what the trainer computed for the same drafter on rollouts that it was not trained on."
    else:
        text += " No expected length: no published drafter was scored on held-out rollouts before it served."
    text += f" The served drafter changed {num_swaps} {_plural('time', num_swaps)}."
    return Plot(
        name, title,
        lambda width: line_figure(
            lines, "acceptance length", width, marks=marks, floor=(1.0, "1: no gain")
        ),
        text, f"{_described(run.steps, served, 'Served acceptance length')} {num_swaps} drafter swaps are marked.",
        wide=True,
    )  # fmt: skip


def _decisions(run: RunRecord) -> Table:
    """Every event of the drafter; the newest MOST_DECISIONS of a long run."""
    rows = [
        (str(event["step"]), event["kind"], f"d{event['version']}", event["reason"])
        for event in run.decisions[-MOST_DECISIONS:]
    ]
    return Table(("step", "decision", "serves next", "why"), rows, numeric=(0,))


def _positions(run: RunRecord) -> Plot:
    name, title = "acceptance_by_position", "Acceptance by draft position"
    lines = position_lines(run)
    if not lines:
        return Plot(name, title, None, "No step of this run measured acceptance by position.")
    return Plot(
        name, title,
        lambda width: line_figure(lines, "accepted share", width),
        "Share of verification steps that accepted all draft tokens up to this position; it never rises with it.",
        " ".join(_described(run.steps, line.values, f"Position {i}") for i, line in enumerate(lines, start=1)),
    )  # fmt: skip


def position_lines(run: RunRecord) -> list[Line]:
    """Served acceptance rate over steps, a line for each draft position that was measured."""
    lines = []
    for position in range(1, (run.setting("rollout.draft_tokens") or 0) + 1):
        line = Line(f"token {position}", run.steps, run.column(f"rollout/acceptance_rate_pos_{position}"))
        if line.measured:
            lines.append(line)
    return lines


def _lag(run: RunRecord) -> Plot:
    name, title = "drafter_lag", "Drafter lag"
    served = Line("drafter that served", run.steps, served_lag(run.rows))
    trained = Line("features trained on", run.steps, run.column("drafter/lag_versions"))
    lines = [line for line in (served, trained) if line.measured]
    if not lines:
        return Plot(name, title, None, "No step of this run recorded versions.")
    return Plot(
        name, title,
        lambda width: line_figure(lines, "policy versions", width),
        "In policy versions. Drafter that served: from the newest rollouts it can have seen to those it drafted for. "
        "Features trained on: mean age of the features in the trainer's batches.",
        _described(run.steps, lines[0].values, f"Lag of the {lines[0].label}"),
    )  # fmt: skip


def _drafter_loss(run: RunRecord) -> Plot:
    if run.setting("drafter.train") is False:
        return Plot("drafter_loss", "Drafter loss", None, "The drafter of this run was frozen: it has no loss.")
    return _curve(
        run, "drafter_loss", "Drafter loss", "drafter/loss", "loss", "Training loss of the drafter, mean of each step."
    )


def _curve(run: RunRecord, name: str, title: str, metric: str, ylabel: str, text: str) -> Plot:
    line = Line(title.lower(), run.steps, run.column(metric))
    if not line.measured:
        return Plot(name, title, None, f"No step of this run measured it ({metric}).")
    alt = _described(run.steps, line.values, title)
    return Plot(name, title, lambda width: line_figure([line], ylabel, width), text, alt)


def _speedup(run: RunRecord) -> Plot:
    return _curve(
        run, "speedup", "Speed against no speculation", SPEEDUP, "times as fast",
        "How many times faster the step's tokens were decoded than without speculation, by the measured times of engine "
        "steps. 1 where speculation was off; prompts are not in it.",
    )  # fmt: skip


def _stages(run: RunRecord) -> Plot:
    name, title = "time_per_stage", "Time per stage"
    stages = {
        label: [value or 0.0 for value in run.column(f"time/{stage}_s")]
        for stage, label in STAGES.items()
        if any(run.column(f"time/{stage}_s"))
    }
    if not stages:
        return Plot(name, title, None, "No step of this run recorded times.")
    named = [sum(seconds) for seconds in zip(*stages.values(), strict=True)]
    rest = [max(0.0, (step or 0.0) - sum_) for step, sum_ in zip(run.column("time/step_s"), named, strict=True)]
    whole = sum(named) + sum(rest)
    if sum(rest) > 0.01 * whole:
        stages["rest"] = rest
    # What nobody could see in the figure only makes its legend longer.
    stages = {label: seconds for label, seconds in stages.items() if sum(seconds) > 0.005 * whole}
    shares = ", ".join(f"{label} {100 * sum(seconds) / whole:.0f}\u00a0%" for label, seconds in stages.items())
    return Plot(
        name, title,
        lambda width: stacked_figure(run.steps, stages, width),
        f"Policy and drafter train side by side. Over the run: {shares}.",
        f"Stacked bars of seconds a step. {shares}.",
    )  # fmt: skip


def _described(steps: list[int], values: Any, what: str) -> str:
    """Alternative text of a curve."""
    measured = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    (first, start), (last, end) = measured[0], measured[-1]
    if len(measured) == 1:
        return f"{what}: {start:.2f} in step {first}, its only value."
    low, high = min(value for _, value in measured), max(value for _, value in measured)
    return f"{what}: {start:.2f} in step {first}, {end:.2f} in step {last}, between {low:.2f} and {high:.2f}."


def _provenance(run: RunRecord) -> list[Section]:
    """Code, packages and machine of the last attempt; nothing when they were not recorded."""
    if not run.attempts:
        return []
    last = run.attempts[-1]
    git, machine = last.get("git") or {}, last.get("machine") or {}
    commit = f"{git.get('commit') or 'unknown'}{' with uncommitted changes' if git.get('dirty') else ''}"
    rows = [
        ("command", " ".join(last.get("argv", []))),
        ("attempts", str(len(run.attempts))),
        ("commit", commit if git else "not a checkout"),
        ("machine", f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB"),
        ("GPUs", "; ".join(machine.get("gpus") or []) or "none"),
        ("packages", ", ".join(f"{name} {version}" for name, version in (last.get("packages") or {}).items())),
    ]
    return [Section("What it ran on", tables=[Table(("", ""), rows)], folded=True)]


def _settings(run: RunRecord) -> Table:
    return Table(("section", "settings"), [(key, json.dumps(value)) for key, value in run.config.items()])


def _most(run: RunRecord) -> int:
    return 1 + int(run.setting("rollout.draft_tokens") or 0)


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"
