"""From measured turns to the numbers of `cotrain bench`: ratios within a round, and the table of arms."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

ADAPTIVE = "adaptive"
METHODS = ("none", "ngram", "greedy", "probabilistic", ADAPTIVE)


@dataclass(frozen=True)
class Arm:
    """One way to generate."""

    method: str
    """One of METHODS."""
    num_speculative_tokens: int
    """Draft tokens of every step; the most of any step when adaptive."""

    def __str__(self) -> str:
        if self.method == "none":
            return "no speculation"
        return f"{self.method} k{'<=' if self.method == ADAPTIVE else '='}{self.num_speculative_tokens}"


NO_SPECULATION = Arm("none", 0)


@dataclass(frozen=True)
class Turn:
    """One turn of one arm."""

    arm: str
    batch: int
    round: int
    num_tokens: int
    """Tokens decoded, without the first of each response, which comes from prefilling the prompt."""
    decode_seconds: float
    """Time from when every response had its first token until the last token."""
    num_drafts: int = 0
    """Verification steps with draft tokens, summed over requests."""
    accepted_per_position: tuple[int, ...] = ()
    """Verification steps that accepted a draft position and all before it."""
    full_tokens: int = 0
    """Tokens of the engine steps in which the whole batch decoded; 0 where the turn as a whole is asked for."""
    full_seconds: float = 0.0
    """Time of these steps."""

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed while the whole batch runs, or where that was not measured, until the last token."""
        return self.full_tokens / self.full_seconds if self.full_seconds else self.tokens_per_second_to_the_end

    @property
    def tokens_per_second_to_the_end(self) -> float:
        """Decoding speed until the last token: where lengths of steps differ, some responses wait for the slowest."""
        return self.num_tokens / self.decode_seconds

    @property
    def num_steps(self) -> int:
        """Steps summed over requests; one without draft tokens (n-gram) emits one token."""
        return max(self.num_drafts, self.num_tokens - sum(self.accepted_per_position))


def results(turns: list[Turn]) -> pd.DataFrame:
    """A row for each batch size and arm; the index is both as text.

    Ratios are to no speculation in the same round: geometric mean, its standard error by the scatter of the rounds (NaN
    with a single round), smallest and largest.
    """
    plain = {(turn.batch, turn.round): turn for turn in turns if turn.arm == str(NO_SPECULATION)}
    rows = {}
    for batch, arm in sorted(dict.fromkeys((turn.batch, turn.arm) for turn in turns), key=lambda pair: pair[0]):
        own = [turn for turn in turns if (turn.batch, turn.arm) == (batch, arm)]
        base = [plain[batch, turn.round] for turn in own]
        speeds, to_the_end = (
            pd.Series([getattr(turn, name) / getattr(other, name) for turn, other in zip(own, base, strict=True)])
            for name in ("tokens_per_second", "tokens_per_second_to_the_end")
        )
        mean = np.exp(np.log(speeds).mean())
        drafts = sum(turn.num_drafts for turn in own)
        accepted = [sum(c) for c in zip(*(turn.accepted_per_position for turn in own if turn.num_drafts), strict=True)]
        rows[f"batch {batch}, {arm}"] = {
            "tokens_per_second": float(np.median([turn.tokens_per_second for turn in own])),
            "mean": mean,
            "error": mean * np.log(speeds).sem(),
            "min": speeds.min(),
            "max": speeds.max(),
            "to_the_end": np.exp(np.log(to_the_end).mean()),
            "acceptance_length": 1 + sum(accepted) / sum(turn.num_steps for turn in own),
            "accepted": [count / drafts for count in accepted],
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def markdown(about: dict[str, Any], found: pd.DataFrame) -> str:
    """bench.md: what ran where, and the table of arms."""
    options, host = about["options"], about["machine"]
    each = "at most " if options["stop_at_eos"] or options["drain"] else ""
    speed = "of the whole turn" if each else "while the whole batch runs"
    table = pd.DataFrame(
        {
            "tokens/s": found["tokens_per_second"].map("{:.1f}".format),
            "ratio": found["mean"].map("{:.3f}".format)
            + found["error"].map(" +- {:.3f}".format).replace(" +- nan", ""),
            "min..max": found["min"].map("{:.2f}".format) + found["max"].map("..{:.2f}".format),
            "to the end": found["to_the_end"].map("{:.3f}".format),
            "acceptance length": found["acceptance_length"].map("{:.2f}".format),
            "accepted at 1, 2, ...": found["accepted"].map(lambda rates: " ".join(f"{rate:.2f}" for rate in rates)),
        }
    )
    lines = [
        f"# {options['model']}, drafter {options['drafter']}",
        "",
        f"{about['date']}, {', '.join(host['gpus']) or host['cpu']}, {options['threads']} threads, "
        f"load before the start {about['load']}; {options['dtype']}, temperature {options['temperature']:g}, "
        f"{each}{options['tokens']} tokens a response, {options['rounds']} rounds of {options['groups']} batches.",
        *(f"Note: {note}." for note in about["notes"]),
        "",
        table.to_markdown(disable_numparse=True),
        "",
        f"tokens/s: decoding {speed}, median over rounds. ratio: to no speculation in the same round, geometric mean "
        "with its standard error by the scatter of the rounds, and range. to the end: the same of the time until the "
        "last response has ended. acceptance length: tokens per verification step. accepted: share of drafts whose "
        "position was accepted.",
    ]
    return "\n".join(lines) + "\n"
