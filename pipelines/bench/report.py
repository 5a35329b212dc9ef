"""Turns the measurements of `cotrain bench` into ratios within each round and a table of arms."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from drafters.files import write_json
from pipelines.engines import headline
from pipelines.page.page import Page, Section, write_page

ADAPTIVE = "adaptive"
METHODS = ("none", "ngram", "suffix", "greedy", "probabilistic", "mixed", ADAPTIVE, "adaptive-suffix", "adaptive-mixed")
OF_ONE_ENGINE = {"none": "stock", "greedy": "drafter", "probabilistic": "drafter", ADAPTIVE: "drafter"}
"""Engine by method. Every other method has an engine of its own, because it may draft from what that engine generated."""


@dataclass(frozen=True)
class Arm:
    method: str
    num_speculative_tokens: int
    """Draft tokens per verification step; the maximum for an adaptive arm."""

    @property
    def engine(self) -> str:
        return OF_ONE_ENGINE.get(self.method, self.method)

    @property
    def adapts(self) -> bool:
        """The engine chooses the draft length."""
        return self.method.startswith(ADAPTIVE)

    def __str__(self) -> str:
        if self.method == "none":
            return "no speculation"
        return f"{self.method} k{'<=' if self.adapts else '='}{self.num_speculative_tokens}"


NO_SPECULATION = Arm("none", 0)


@dataclass(frozen=True)
class Turn:
    """One batch of prompts that one arm has responded to."""

    arm: str
    batch: int
    round: int
    num_tokens: int
    """Tokens decoded, without the first of each response, which comes from prefilling the prompt."""
    timed_tokens: int
    seconds: float
    """What decoding timed_tokens took: while the whole batch runs, or all of it if responses end one after another."""
    num_drafts: int = 0
    """Verification steps with draft tokens, summed over requests."""
    accepted_per_position: tuple[int, ...] = ()
    """Verification steps that accepted a draft position and all before it."""
    by_proposer: dict[str, float] = field(default_factory=dict)
    """Drafts, draft tokens and accepted tokens of history and drafter; empty for an engine without history."""

    @property
    def num_steps(self) -> int:
        """Decoding steps summed over requests. A step without draft tokens (n-gram) counts too, and emits one token."""
        return max(self.num_drafts, self.num_tokens - sum(self.accepted_per_position))


def results(turns: list[Turn]) -> pd.DataFrame:
    """A row for each batch size and arm; the index names both, as in "batch 4, greedy k=2".

    Ratios are to no speculation in the same round: geometric mean, its standard error from the scatter over rounds (NaN
    with a single round), smallest and largest.
    """
    timed = (
        pd.DataFrame(asdict(turn) for turn in turns)
        .groupby(["batch", "arm", "round"])[["timed_tokens", "seconds"]]
        .sum()
    )
    speeds, rows = timed["timed_tokens"] / timed["seconds"], {}
    for batch, arm in sorted(dict.fromkeys((turn.batch, turn.arm) for turn in turns), key=lambda pair: pair[0]):
        own = [turn for turn in turns if (turn.batch, turn.arm) == (batch, arm)]
        ratios = speeds[batch, arm] / speeds[batch, str(NO_SPECULATION)]
        mean = np.exp(np.log(ratios).mean())
        drafts = sum(turn.num_drafts for turn in own)
        accepted = [sum(c) for c in zip(*(turn.accepted_per_position for turn in own if turn.num_drafts), strict=True)]
        rows[f"batch {batch}, {arm}"] = {
            "tokens_per_second": speeds[batch, arm].median(),
            "mean": mean,
            "error": mean * np.log(ratios).sem(),
            "min": ratios.min(),
            "max": ratios.max(),
            "acceptance_length": 1 + sum(accepted) / sum(turn.num_steps for turn in own),
            "accepted": [count / drafts for count in accepted],
            "proposers": ", ".join(_of_proposer(own, name) for name in ("history", "drafter")).strip(", "),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _of_proposer(turns: list[Turn], name: str) -> str:
    """How many of one proposer's draft tokens were accepted, as text; empty if it drafted none."""
    drafted, accepted = (
        sum(t.by_proposer.get(f"{name}/{what}_tokens", 0) for t in turns) for what in ("drafted", "accepted")
    )
    return f"{name} {accepted:.0f} of {drafted:.0f}" if drafted else ""


def write_results(out: Path, about: dict[str, Any], turns: list[Turn]) -> Path:
    """Write bench.json and the page bench.md; returns the page."""
    found = results(turns)
    arms = found.astype(object).where(found.notna(), None).rename_axis("name").reset_index().to_dict("records")
    write_json(out / "bench.json", about | {"arms": arms, "turns": [asdict(turn) for turn in turns]})
    options = about["options"]
    each = "at most " if options["stop_at_eos"] or options["drain"] else ""
    paragraphs = [
        headline(about) + f", load before the start {about['load']}",
        f"Temperature {options['temperature']:g}, {each}{options['tokens']} tokens a response, {options['rounds']} rounds of "
        f"{options['groups']} batches.",
        *(f"Note: {note}." for note in about["notes"]),
    ]
    text = (
        f"tokens/s: decoding {'of the whole turn' if each else 'while the whole batch runs'}, median over rounds. ratio: to "
        "no speculation in the same round, geometric mean with its standard error by the scatter of the rounds, and range. "
        "acceptance length: tokens per verification step. accepted: share of drafts whose position was accepted."
    )
    return write_page(out / "bench.md", Page("Speed", paragraphs, [Section("Arms", text, arms_table(found))]))


def arms_table(found: pd.DataFrame) -> pd.DataFrame:
    """The table of bench.md, as text."""
    errors = found["error"].map(" +- {:.3f}".format).replace(" +- nan", "")
    table = pd.DataFrame(
        {
            "arm": found.index,
            "tokens/s": found["tokens_per_second"].map("{:.1f}".format),
            "ratio": found["mean"].map("{:.3f}".format) + errors,
            "min..max": found["min"].map("{:.2f}".format) + found["max"].map("..{:.2f}".format),
            "acceptance length": found["acceptance_length"].map("{:.2f}".format),
            "accepted at 1, 2, ...": found["accepted"].map(lambda rates: " ".join(f"{rate:.2f}" for rate in rates)),
        }
    )
    return table.assign(**{"accepted of drafted tokens": found["proposers"]}) if found["proposers"].any() else table
