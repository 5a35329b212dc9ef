"""What a person reads while a run goes on: start banner, one line a step, progress, and the summary at the end.

Plain lines in a pipe or a log; a spinner is added on a terminal. Numbers come from the rows of metrics.jsonl, and
what was not measured is left out or said to be missing.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole

from cotrain.config.monitor import LEAST_SPECULATED
from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.run_dir import RunDir

Metrics = Mapping[str, float | None]

ETA_WINDOW = 10
"""Steps averaged for the time left; the first ones are slower."""

LEAST_DRAFTS = 100
"""Verification steps that the summary takes an acceptance length from, at least: a dozen say nothing."""


@dataclass(frozen=True)
class RunSummary:
    """What the summary needs beside the configuration and the metrics."""

    seconds: float
    stopped_early: bool
    greedy_identical: bool | None
    """Greedy output with and without speculation compared; None when the check was not made."""
    drafter_uri: str | None
    """models:/NAME@serving of the last published drafter; None when none was registered."""
    next_commands: Sequence[tuple[str, str]]
    """(what it does, command), most useful first."""
    report: Path | None = None
    """Page of the run's report; None when it could not be written."""
    speculation: str | None = None
    """The draft lengths in use at the end, and why; None without a drafter."""


class Console:
    """Writes to one stream. Safe to use from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = RichConsole(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._step_seconds: list[float] = []

    def say(self, text: str) -> None:
        """One message on lines of its own."""
        self._rich.print(text)

    def banner(
        self,
        config: RunConfig,
        run_dir: RunDir,
        devices: Mapping[str, str],
        ui_hint: str,
        native_head: bool = False,
        tap: str | None = None,
    ) -> None:
        """What starts, where, and how to watch it.

        devices: role -> devices, for example {"policy": "cuda:0"}. native_head: the policy brings a drafter. tap: what
        is to be said of the feature tap.
        """
        rollouts = f"{config.rollout.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples"
        lines = [("run", str(run_dir.path)), ("policy", config.policy.model), ("steps", f"{config.steps} ({rollouts})")]
        if config.drafter:
            first = config.drafter.init or ("the policy's own head" if native_head else "random init")
            lines.append(("drafter", f"{config.drafter.model.type} from {first}"))
        lines += [("tap", tap)] if tap else []
        lines += [(f"{role} on", device) for role, device in devices.items()]
        lines += [
            ("log", f"tail -f {run_dir.logs}/*.log"),
            ("metrics", f"tail -f {run_dir.metrics}"),
            ("mlflow", ui_hint),
        ]
        width = max(len(label) for label, _ in lines)
        self.say("\n".join(f"  {label:<{width}}  {text}" for label, text in lines))

    @contextmanager
    def phase(self, title: str, *, terminal_only: bool = False) -> Iterator[None]:
        """Show what is going on; `terminal_only` for parts of a step, which would flood a log."""
        started = time.monotonic()
        if self._rich.is_terminal:
            with self._rich.status(title):
                yield
        else:
            if not terminal_only:
                self.say(f"{title} ...")
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
        """The step line. `missing_steps`: steps that MLflow has not got. `notes`: what else to say of this step."""
        if (seconds := metrics.get("time/step_s")) is not None:
            self._step_seconds = [*self._step_seconds, seconds][-ETA_WINDOW:]
        line = step_line(step, steps, metrics, versions)
        if self._step_seconds and step < steps:
            left = (steps - step) * sum(self._step_seconds) / len(self._step_seconds)
            line += f"  eta {duration(left, decimals=0)}"
        if missing_steps:
            line += f"  mlflow {missing_steps} behind"
        self.say("  ".join([line, *notes]))

    def summary(self, config: RunConfig, run_dir: RunDir, rows: Sequence[Mapping[str, Any]], run: RunSummary) -> None:
        """What the run did, for somebody who has not seen one before."""
        self.say("\n" + "\n".join(summary_lines(config, run_dir, rows, run)))


def step_line(step: int, steps: int, metrics: Metrics, versions: Versions) -> str:
    """One step in one line; a part whose metric does not exist in the run is left out."""
    parts = [f"step {step}/{steps}"]

    def add(name: str, text: str) -> None:
        if (value := metrics.get(name)) is not None:
            parts.append(text.format(value))

    add("time/step_s", "{:.1f}s")
    add("policy/reward", "reward {:.2f}")
    add("rollout/response_length", "len {:.0f}")
    add("rollout/acceptance_length", "accept {:.2f}")
    if (expected := metrics.get("rollout/expected_acceptance_length")) is not None:
        # A step has an expected length at the draft lengths that it served.
        parts[-1] += f" (exp {expected:.2f})"
    longest = metrics.get("rollout/expected_acceptance_length_longest")
    if longest is not None and not metrics.get("rollout/num_drafts"):
        parts.append(f"no drafts (exp {longest:.2f} if drafted)")
    if metrics.get("rollout/num_drafts"):
        draft_length = (metrics["rollout/draft_tokens"] or 0) / (metrics["rollout/num_drafts"] or 1)
        parts.append(f"k {draft_length:.1f}".removesuffix(".0"))
    add("rollout/speedup_vs_no_speculation", "gain {:.2f}x")
    add("rollout/tokens_per_s", "tok/s {:.0f}")
    add("policy/kl", "kl {:.3f}")
    parts.append(f"p{versions.policy} d{versions.drafter}")
    return "  ".join(parts)


def summary_lines(config: RunConfig, run_dir: RunDir, rows: Sequence[Mapping[str, Any]], run: RunSummary) -> list[str]:
    """The summary's text. "From" and "to" are means over the first and the last tenth of the steps; of rewards, third."""
    span = max(1, len(rows) // 10)
    tokens = sum(row.get("rollout/generated_tokens") or 0 for row in rows)
    head = "Stopped" if run.stopped_early else "Done"
    lines = [
        f"{head}: {len(rows)} of {config.steps} steps in {duration(run.seconds)}"
        + (f", {tokens:,.0f} tokens generated" if tokens else ""),
        "",
        f"  policy       {config.policy.model}, trained by reinforcement learning",
    ]
    # Rewards of single steps scatter too much for a tenth to say anything.
    if reward := _from_to(rows, "policy/reward", max(1, len(rows) // 3)):
        lines.append(f"  reward       {reward}   (mean of the first and the last third; higher is better)")
    if config.drafter:
        lines += _drafter_lines(config, rows, run, span)
    lines += ["", f"  run folder   {run_dir.path}"]
    if run.report:
        lines.append(f"  report       {run.report}")
    if run.drafter_uri:
        lines.append(f"  drafter      {run.drafter_uri} in MLflow; serves in stock vLLM as it is")
    if run.next_commands:
        width = max(len(what) for what, _ in run.next_commands)
        lines += ["", "Next:", *(f"  {what:<{width}}  {command}" for what, command in run.next_commands)]
    return lines


def _drafter_lines(config: RunConfig, rows: Sequence[Mapping[str, Any]], run: RunSummary, span: int) -> list[str]:
    assert config.drafter is not None
    how = "trained beside it" if config.drafter.train else "frozen"
    lines = [f"  drafter      {config.drafter.model.type}, {how}"]
    if acceptance := _acceptance(rows, span):
        k = config.rollout.draft_tokens
        lines.append(f"  acceptance   {acceptance}   (tokens per verification step; 1 is no gain, {k + 1} the most)")
    lines.append(f"  swaps        {_swaps(rows)}")
    lines.append(f"  lossless     {_lossless(config, rows, run)}")
    if run.speculation:
        lines.append(f"  speculation  {run.speculation}")
    if gain := _from_to(rows, "rollout/speedup_vs_no_speculation", span):
        lines.append(f"  speed        decoding {gain} times no speculation, by step times measured in this run")
    else:
        lines.append("  speed        against no speculation was not measured in this run; `cotrain bench` measures it")
    return lines


def _swaps(rows: Sequence[Mapping[str, Any]]) -> str:
    published, back = (sum(bool(row.get(f"drafter/{kind}")) for row in rows) for kind in ("published", "rolled_back"))
    judged = [row["gate/publish"] for row in rows if row.get("gate/publish") is not None]
    text = f"{published} drafters put into the running engine"
    if judged:
        text += f", {len(judged) - sum(map(bool, judged))} kept back by the gate"
    return text + (f", {back} times back to an earlier one" if back else "")


def _lossless(config: RunConfig, rows: Sequence[Mapping[str, Any]], run: RunSummary) -> str:
    """What was checked, and on how much; a check of tokens that were not speculated says nothing of speculation."""
    checks = [row for row in rows if row.get("lossless/check") is not None]
    tokens, speculated = (
        sum(row.get(f"lossless/{name}") or 0 for row in checks) for name in ("tokens", "speculated_tokens")
    )
    if failed := sum(not row.get("lossless/passed") for row in checks):
        found = f"{failed} of {len(checks)} checks FAILED"
    elif speculated:
        number = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
        found = f"verified on {tokens:,.0f} sampled tokens, {speculated:,.0f} of them speculated ({number} in this run)"
    elif config.lossless.every:
        least = f"no check held {LEAST_SPECULATED} speculated tokens"
        found = f"not checked in this run: {least} (cotrain verify checks the engine)"
    else:
        found = "not checked in this run: lossless.every is 0"
    if run.greedy_identical is not None:
        same = "identical with and without speculation" if run.greedy_identical else "DIFFERS: please report this"
        found += f"; greedy output {same}"
    return found


def _acceptance(rows: Sequence[Mapping[str, Any]], span: int) -> str | None:
    """Over the first and the last steps: `span` of them, and as many more as it takes for LEAST_DRAFTS."""
    drafted = [
        (row["rollout/acceptance_length"], row.get("rollout/num_drafts") or LEAST_DRAFTS)
        for row in rows
        if row.get("rollout/acceptance_length") is not None
    ]
    if not drafted:
        return None

    def pooled(steps: Sequence[tuple[float, float]]) -> float:
        taken = next(
            (n for n in range(span, len(steps)) if sum(drafts for _, drafts in steps[:n]) >= LEAST_DRAFTS), len(steps)
        )
        total = sum(drafts for _, drafts in steps[:taken])
        return sum(length * drafts for length, drafts in steps[:taken]) / total

    return f"{pooled(drafted):.2f} -> {pooled(drafted[::-1]):.2f}"


def _from_to(rows: Sequence[Mapping[str, Any]], name: str, span: int) -> str | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return None
    first, last = values[:span], values[-span:]
    return f"{sum(first) / len(first):.2f} -> {sum(last) / len(last):.2f}"


def duration(seconds: float, decimals: int = 1) -> str:
    """12.3s, 4m or 1h 05m."""
    if seconds < 59.5:
        return f"{seconds:.{decimals}f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
