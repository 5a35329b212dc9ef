"""The console output of a run: what is running, and one line per step, with the numbers that its row of metrics.jsonl has."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from textwrap import TextWrapper
from typing import TextIO

from rich.console import Console as RichConsole

from cotrain.records import Versions

Metrics = Mapping[str, float | None]
WIDTH = 120  # characters of a line of the console, apart from single words that are longer

ETA_WINDOW = 10  # number of recent steps from which the time left is estimated; the first ones are slower

COLUMNS: tuple[tuple[str, str], ...] = (
    ("time/step_s", "{:.1f}s"),
    ("policy/reward", "reward {:.2f}"),
    ("validation/reward", "validation {:.2f}"),
    ("lag", "lag {:.1f}"),
    ("rollout/response_length", "len {:.0f}"),
    ("rollout/acceptance_length", "accept {:.2f}"),
    ("rollout/expected_acceptance_length", "(exp {:.2f})"),
    ("no_drafts", "no drafts (exp {:.2f} if drafted)"),
    ("draft_length", "k {:.2g}"),
    ("rollout/speedup_vs_no_speculation", "gain {:.2f}x"),
    ("rollout/tokens_per_s", "tok/s {:.0f}"),
    ("policy/kl", "kl {:.3f}"),
)
"""Metric and format of each part of a step line."""


class Console:
    """Writes to one stream. Safe to use from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = RichConsole(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._step_seconds: deque[float] = deque(maxlen=ETA_WINDOW)

    def say(self, text: str) -> None:
        self._rich.print(text)

    @contextmanager
    def phase(self, title: str, *, terminal_only: bool = False) -> Iterator[None]:
        """Show what is running; use `terminal_only` for the parts of a step, which would flood a log."""
        started = time.monotonic()
        if not (terminal_only or self._rich.is_terminal):
            self.say(f"{title} ...")
        with self._rich.status(title) if self._rich.is_terminal else nullcontext():
            yield
        if not terminal_only:
            self.say(f"{title}: {duration(time.monotonic() - started)}")

    def step(
        self, step: int, steps: int | None, metrics: Metrics, versions: Versions, notes: Sequence[str] = ()
    ) -> None:
        """Print the step line. steps: None without a planned end. notes: texts to append, or below if the line gets too long."""
        if (seconds := metrics.get("time/step_s")) is not None:
            self._step_seconds.append(seconds)
        eta = idle = ""
        if steps is not None and self._step_seconds and step < steps:
            left = (steps - step) * sum(self._step_seconds) / len(self._step_seconds)
            eta = f"eta {duration(left, decimals=0)}"
        if "time/wait_for_rollouts_s" in metrics:  # generation runs ahead of learning
            shares = sorted(
                (name.removeprefix("idle/")[0], metrics[name]) for name in metrics if name.startswith("idle/")
            )
            idle = " ".join(["idle", *(f"{role}{share:.0%}" for role, share in shares)])
        lines = [step_line(step, steps, metrics, versions)]
        for note in filter(None, [eta, idle, *notes]):
            fits = len(lines[-1]) + len(note) + 2 <= WIDTH
            lines[-1:] = [f"{lines[-1]}  {note}"] if fits else [lines[-1], f"  {note}"]
        self.say("\n".join(lines))


def step_line(step: int, steps: int | None, metrics: Metrics, versions: Versions) -> str:
    """Return the part of the step line that comes from the step's metrics, see COLUMNS."""
    shown = dict(metrics)
    if drafts := metrics.get("rollout/num_drafts"):
        shown["draft_length"] = (metrics.get("rollout/drafted_tokens") or 0) / drafts
    else:
        shown["no_drafts"] = metrics.get("rollout/expected_acceptance_length_longest")
    if "time/wait_for_rollouts_s" in metrics:  # generation runs ahead of learning
        shown["lag"] = metrics.get("stream/lag_mean")
    if not round(metrics.get("policy/kl") or 0, 3):
        shown["policy/kl"] = None  # the engines' policy is the learner's, but for rounding
    parts = [text.format(shown[name]) for name, text in COLUMNS if shown.get(name) is not None]
    position = f"round {step}" if steps is None else f"step {step}/{steps}"
    return "  ".join([position, *parts, f"p{versions.policy} d{versions.drafter}"]).replace("  (", " (")


def aligned(lines: Mapping[str, str], wraps: bool = False) -> str:
    """Return one line per label, with the texts aligned. wraps: break them at WIDTH; commands should stay whole to be copied."""
    width = max(map(len, lines))
    rows = [f"  {label:<{width}}  {text}".rstrip() for label, text in lines.items()]
    wrapper = TextWrapper(WIDTH, subsequent_indent=" " * (width + 4), break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, rows) if wraps else rows)


def duration(seconds: float, decimals: int = 1) -> str:
    """Format a duration as 12.3s, 4m or 1h 05m."""
    if seconds < 59.5:
        return f"{seconds:.{decimals}f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
