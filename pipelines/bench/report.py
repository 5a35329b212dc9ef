"""Turns the measurements of `cotrain bench` into ratios within each round and a table of arms."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from drafters.files import write_json
from pipelines.engines import headline
from pipelines.page.page import Section, write_page

ADAPTIVE = "adaptive"
METHODS = ("none", "suffix", "greedy", "probabilistic", "mixed", ADAPTIVE, "adaptive-suffix", "adaptive-mixed")


@dataclass(frozen=True)
class Arm:
    method: str
    num_speculative_tokens: int
    """Draft tokens per verification step; the maximum for an adaptive arm."""

    @property
    def adapts(self) -> bool:
        """The engine chooses the draft length."""
        return self.method.startswith(ADAPTIVE)

    @property
    def uses_history(self) -> bool:
        """The engine drafts from what it generated in earlier rounds, with or without drafter."""
        return self.method.endswith(("suffix", "mixed"))

    @property
    def uses_drafter(self) -> bool:
        return self.method != "none" and not self.method.endswith("suffix")

    @property
    def engine(self) -> str:
        """Name of its engine. An arm with history shares it with no other, else it would draft from what others generated."""
        return self.method if self.uses_history else "drafter" if self.uses_drafter else "stock"

    @property
    def draft_sample_method(self) -> str:
        """How the drafter's tokens are sampled. Probabilistic drafts are greedy ones at temperature 0."""
        return "greedy" if self.method == "greedy" else "probabilistic"

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
        """Decoding steps summed over requests. A step without draft tokens counts too, and emits one token."""
        return max(self.num_drafts, self.num_tokens - sum(self.accepted_per_position))


def results(turns: list[Turn]) -> pd.DataFrame:
    """A row for each batch size and arm; the index names both, as in "batch 4, greedy k=2".

    Ratios are to no speculation in the same round: geometric mean, its standard error from the scatter over rounds (NaN
    with a single round), smallest and largest.
    """
    table = pd.DataFrame([asdict(turn) | {"num_steps": turn.num_steps} for turn in turns])
    timed = table.groupby(["batch", "arm", "round"])[["timed_tokens", "seconds"]].sum()
    speeds = (timed["timed_tokens"] / timed["seconds"]).unstack("round")
    rows = {}
    for (batch, arm), own in table.sort_values("batch", kind="stable").groupby(["batch", "arm"], sort=False):
        ratios = speeds.loc[(batch, arm)] / speeds.loc[(batch, str(NO_SPECULATION))]
        accepted = pd.DataFrame([counts for counts in own["accepted_per_position"] if counts]).sum()
        mean = np.exp(np.log(ratios).mean())
        rows[f"batch {batch}, {arm}"] = {
            "tokens/s": speeds.loc[(batch, arm)].median(),
            "ratio": mean,
            "+-": mean * np.log(ratios).sem(),
            "min": ratios.min(),
            "max": ratios.max(),
            "acceptance length": 1 + accepted.sum() / own["num_steps"].sum(),
            "accepted at 1, 2, ...": (accepted / own["num_drafts"].sum()).round(3).tolist(),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def write_results(out: Path, about: dict[str, Any], turns: list[Turn]) -> Path:
    """Write bench.json and the page bench.md; returns the page."""
    table = results(turns).rename_axis("arm").reset_index()
    arms = table.astype(object).where(table.notna(), None).to_dict("records")
    write_json(out / "bench.json", about | {"arms": arms, "turns": [asdict(turn) for turn in turns]})
    options = about["options"]
    each = "at most " if options["stop_at_eos"] or options["drain"] else ""
    head = [
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
    sections = [*(Section("", line) for line in head), Section("Arms", text, table.round(3).fillna("-"))]
    return write_page(out / "bench.md", "Speed", sections)
