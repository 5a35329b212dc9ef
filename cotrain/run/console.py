"""What a person reads while a run goes on: start banner, one line a step, and the summary at the end.

Numbers come from the rows of metrics.jsonl. What was not measured is left out or said to be missing. A terminal also
shows what is going on at the moment.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole

from cotrain.config.schema import LEAST_SPECULATED, RunConfig
from cotrain.records import Versions
from cotrain.run.run_dir import RunDir

Metrics = Mapping[str, float | None]
Rows = Sequence[Mapping[str, Any]]

ETA_WINDOW = 10
"""The time left is estimated from so many steps; the first ones are slower."""

COLUMNS: tuple[tuple[str, str], ...] = (
    ("time/step_s", "{:.1f}s"),
    ("policy/reward", "reward {:.2f}"),
    ("rollout/response_length", "len {:.0f}"),
    ("rollout/acceptance_length", "accept {:.2f}"),
    ("rollout/expected_acceptance_length", "(exp {:.2f})"),
    ("no_drafts", "no drafts (exp {:.2f} if drafted)"),
    ("draft_length", "k {:.2g}"),
    ("rollout/speedup_vs_no_speculation", "gain {:.2f}x"),
    ("rollout/tokens_per_s", "tok/s {:.0f}"),
    ("policy/kl", "kl {:.3f}"),
)
"""Metric and text of each part of a step line."""


@dataclass(frozen=True)
class RunSummary:
    """What the summary needs beside the configuration and the metrics."""

    stopped_early: bool
    greedy_identical: bool | None
    """Greedy output with and without speculation compared; None when the check was not made."""
    drafter_uri: str | None
    """models:/NAME@serving of the last published drafter; None when none was registered."""
    next_commands: Sequence[tuple[str, str]]
    """(what it does, command), most useful first."""
    report: Path | None = None
    """Page of the run's report; None when it could not be written."""
    speculation: str = ""
    """The draft lengths in use at the end, and why; empty without a drafter."""


class Console:
    """Writes to one stream. Safe to use from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = RichConsole(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._step_seconds: deque[float] = deque(maxlen=ETA_WINDOW)

    def say(self, text: str) -> None:
        """Print one message on lines of its own."""
        self._rich.print(text)

    def banner(self, config: RunConfig, run_dir: RunDir, notes: Mapping[str, str]) -> None:
        """Say what starts, where, and how to watch it. notes: further lines, by their label."""
        rollouts = f"{config.rollout.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples"
        lines = {"run": str(run_dir.path), "policy": config.policy.model, "steps": f"{config.steps} ({rollouts})"}
        lines |= {**notes, "log": f"tail -f {run_dir.logs}/*.log", "metrics": f"tail -f {run_dir.metrics}"}
        width = max(map(len, lines))
        self.say("\n".join(f"  {label:<{width}}  {text}" for label, text in lines.items()))

    @contextmanager
    def phase(self, title: str, *, terminal_only: bool = False) -> Iterator[None]:
        """Show what is going on; `terminal_only` for parts of a step, which would flood a log."""
        started = time.monotonic()
        if not (terminal_only or self._rich.is_terminal):
            self.say(f"{title} ...")
        with self._rich.status(title) if self._rich.is_terminal else nullcontext():
            yield
        if not terminal_only:
            self.say(f"{title}: {duration(time.monotonic() - started)}")

    def step(
        self,
        step: int,
        steps: int,
        metrics: Metrics,
        versions: Versions,
        missing_steps: int = 0,
        notes: Sequence[str] = (),
    ) -> None:
        """Print the step line. missing_steps: steps that MLflow has not got. notes: what else to say of this step."""
        if (seconds := metrics.get("time/step_s")) is not None:
            self._step_seconds.append(seconds)
        line = [step_line(step, steps, metrics, versions)]
        if self._step_seconds and step < steps:
            left = (steps - step) * sum(self._step_seconds) / len(self._step_seconds)
            line.append(f"eta {duration(left, decimals=0)}")
        if missing_steps:
            line.append(f"mlflow {missing_steps} behind")
        self.say("  ".join([*line, *notes]))


def step_line(step: int, steps: int, metrics: Metrics, versions: Versions) -> str:
    """The part of the step line that the step's metrics give. See COLUMNS."""
    shown = dict(metrics)
    if drafts := metrics.get("rollout/num_drafts"):
        shown["draft_length"] = (metrics.get("rollout/drafted_tokens") or 0) / drafts
    else:
        shown["no_drafts"] = metrics.get("rollout/expected_acceptance_length_longest")
    parts = [text.format(shown[name]) for name, text in COLUMNS if shown.get(name) is not None]
    return "  ".join([f"step {step}/{steps}", *parts, f"p{versions.policy} d{versions.drafter}"]).replace("  (", " (")


def summary_lines(config: RunConfig, run_dir: RunDir, rows: Rows, run: RunSummary) -> list[str]:
    """What the run did, for somebody who has not seen one before."""
    tokens = sum(_measured(rows, "rollout/generated_tokens"))
    head = f"{'Stopped' if run.stopped_early else 'Done'}: {len(rows)} of {config.steps} steps in "
    head += duration(sum(_measured(rows, "time/step_s"))) + (f", {tokens:,.0f} tokens generated" if tokens else "")
    lines = [head]
    if reward := _from_to(rows, "policy/reward"):
        lines.append(f"  reward       {reward}   (mean of the first and the last third; higher is better)")
    if config.drafter:
        lines += _speculation_lines(config, rows, run)
    lines += ["", f"  run folder   {run_dir.path}"]
    if run.report:
        lines.append(f"  report       {run.report}")
    if run.drafter_uri:
        lines.append(f"  drafter      {run.drafter_uri} in MLflow; serves in stock vLLM as it is")
    width = max((len(what) for what, _ in run.next_commands), default=0)
    return [*lines, "", "Next:", *(f"  {what:<{width}}  {command}" for what, command in run.next_commands)]


def _speculation_lines(config: RunConfig, rows: Rows, run: RunSummary) -> list[str]:
    lines = []
    # Weighted, because a step with a dozen verification steps says little.
    if acceptance := _from_to(rows, "rollout/acceptance_length", "rollout/num_drafts"):
        most = config.rollout.num_speculative_tokens + 1
        lines.append(f"  acceptance   {acceptance}   (tokens per verification step; 1 is no gain, {most} the most)")
    swaps = f"{sum(_measured(rows, 'drafter/published')):.0f} drafters put into the running engine"
    if gate := _measured(rows, "gate/publish"):
        swaps += f", {gate.count(0)} kept back by the gate"
    if back := sum(_measured(rows, "drafter/rolled_back")):
        swaps += f", {back:.0f} times back to an earlier one"
    lines += [f"  swaps        {swaps}", f"  lossless     {_lossless(config, rows, run)}"]
    if run.speculation:
        lines.append(f"  speculation  {run.speculation}")
    gain = _from_to(rows, "rollout/speedup_vs_no_speculation")
    measured = f"decoding {gain} times no speculation, by step times measured in this run"
    missing = "against no speculation was not measured in this run; `cotrain bench` measures it"
    return [*lines, f"  speed        {measured if gain else missing}"]


def _lossless(config: RunConfig, rows: Rows, run: RunSummary) -> str:
    """What was checked, and on how much; a check of tokens that were not speculated says nothing of speculation."""
    passed = _measured(rows, "lossless/passed")
    checks = "1 check" if len(passed) == 1 else f"{len(passed)} checks"
    if failed := passed.count(0):
        found = f"{failed} of {checks} FAILED"
    elif speculated := sum(_measured(rows, "lossless/speculated_tokens")):
        tokens = sum(_measured(rows, "lossless/tokens"))
        found = f"verified on {tokens:,.0f} sampled tokens, {speculated:,.0f} of them speculated ({checks} in this run)"
    elif config.lossless.every:
        least = f"no check held {LEAST_SPECULATED} speculated tokens"
        found = f"not checked in this run: {least} (cotrain verify checks the engine)"
    else:
        found = "not checked in this run: lossless.every is 0"
    if run.greedy_identical is not None:
        same = "identical with and without speculation" if run.greedy_identical else "DIFFERS: please report this"
        found += f"; greedy output {same}"
    return found


def _measured(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _from_to(rows: Rows, name: str, weight: str = "") -> str | None:
    """Means over the first and the last third of the steps that measured `name`; single steps scatter too much."""
    values = [(row[name], row.get(weight) or 1) for row in rows if row.get(name) is not None]
    if not values:
        return None
    span = max(1, len(values) // 3)
    means = (
        sum(value * by for value, by in part) / sum(by for _, by in part) for part in (values[:span], values[-span:])
    )
    return " -> ".join(f"{mean:.2f}" for mean in means)


def duration(seconds: float, decimals: int = 1) -> str:
    """12.3s, 4m or 1h 05m."""
    if seconds < 59.5:
        return f"{seconds:.{decimals}f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
