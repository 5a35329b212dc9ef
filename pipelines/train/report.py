"""What a run did: the facts that are printed at its end, and its report, which adds decisions and curves."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from cotrain.lossless.family import LEAST_SPECULATED
from cotrain.run.console import duration
from pipelines.page.page import REPORT, Section, line_section, write_page
from pipelines.page.record import RunRecord, read_run

MOST_DECISIONS = 12
STAGES = {
    "generate": "rollouts",
    "wait_for_rollouts": "waiting for rollouts",
    "self_check": "feature check",
    "lossless": "check of losslessness",
    "learn": "policy and drafter training",
    "swap_policy": "policy swap",
    "validation": "validation",
    "checkpoint": "checkpoint",
}
DRAFTER, LONGEST = "drafter.model.type", "rollout.num_speculative_tokens"
TURN, CONTEXT = "rollout/acceptance_turn_", "rollout/acceptance_context_"
SERVED, SPEEDUP = "rollout/acceptance_length", "rollout/speedup_vs_no_speculation"
MARKED = ("published", "kept back", "rolled back")
"""Decisions about the drafter that figures mark, after the step that the mark is at."""


def write_run_report(folder: Path) -> Path:
    """Write report/report.html, report.md and PNGs into the folder of a run; returns report.md. Raises the ValueError of `read_run`."""
    run = read_run(folder)
    title = f"{run.settings['name']}, a cotrain {'sidecar' if run.is_sidecar else 'run'}"
    return write_page(folder / REPORT / "report.md", title, list(run_sections(run)))


def run_sections(run: RunRecord) -> Iterator[Section]:
    """The page of a run with at least one step."""
    rest = "The run's config.json, provenance.json and metrics.jsonl hold its configuration, machine and all numbers."
    yield Section("", "\n\n".join(filter(None, [run.warning and f"**{run.warning}**", _subtitle(run), rest])))
    yield Section("In short", table=pd.DataFrame(run_facts(run).items(), columns=["", "what came out"]))
    yield from _speculation(run)
    if run.decisions:
        table = pd.DataFrame(run.decisions[-MOST_DECISIONS:])[["step", "kind", "version", "reason"]]
        table.columns = ["step", "decision", "drafter that serves next", "why"]
        yield Section("Latest decisions about the drafter", "All are in decisions.jsonl.", table)
    if not run.is_sidecar:  # a sidecar sees neither rewards nor what else its host does
        reward = {"rollouts": run.column("policy/reward"), "validation": run.column("validation/reward")}
        length = {"length": run.column("rollout/response_length")}
        yield line_section("Reward", "mean reward", "Mean reward of each step's rollouts, and of [validation].", reward)
        yield line_section("Response length", "tokens", "Mean length of a step's responses.", length)
        yield from _time(run)


def _subtitle(run: RunRecord) -> str:
    get = run.settings.get
    parts = [get("policy.model"), get("task.name") or get("task.path"), f"seed {get('seed')}"]
    if drafter := get(DRAFTER):
        frozen = "frozen " if get("drafter.train") is False else ""
        parts.append(f"{frozen}{drafter}, k = {get(LONGEST)}, {get('rollout.draft_sample_method')} drafts")
    return ", ".join(filter(None, [*parts, progress(run)]))


def progress(run: RunRecord, planned: int | None = None) -> str:
    """Steps, time and tokens: "12 of 12 steps in 4m, 3,801 tokens generated".

    planned: steps that the run was to make, which a resume may have changed since config.json was written.
    """
    tokens = run.column("rollout/generated_tokens").sum()
    steps = f"{run.metrics.index.size}{f' of {planned}' if planned else ''} {'rounds' if run.is_sidecar else 'steps'}"
    return f"{steps} in {duration(run.column('time/step_s').sum())}, {tokens:,.0f} tokens generated"


def run_facts(run: RunRecord, speculation: str = "", greedy_identical: bool | None = None) -> dict[str, str]:
    """What the run did, by label, for a reader who has not seen a run before.

    Two things are known only at the end of a run and are not in its record: speculation, the draft lengths in use, and
    greedy_identical, whether greedy output was the same with and without speculation (None: not compared).
    """
    facts = dict[str, str]()
    if not run.is_sidecar:
        thirds = "(mean of the first and the last third; higher is better)"
        facts["reward"] = f"{_from_to(run, 'policy/reward')}   {thirds}"
        if "validation/reward" in run.metrics:
            error = run.column("validation/reward_error").dropna().iloc[-1]
            facts["validation"] = (
                f"{_from_to(run, 'validation/reward')} +- {error:.2f}   (of the prompts of [validation])"
            )
    if not run.speculates:
        return facts
    # Weighted, because a step with a dozen verification steps says little.
    acceptance, most = _from_to(run, SERVED, "rollout/num_drafts"), 1 + run.settings[LONGEST]
    facts["acceptance"] = f"{acceptance}   (tokens per verification step; 1 is no gain, {most} the most)"
    if DRAFTER in run.settings:
        kept_back, rolled_back = (run.column("gate/publish") == 0).sum(), run.column("drafter/rolled_back").sum()
        swaps = [f"{run.column('drafter/published').sum():.0f} drafters put into the running engine"]
        swaps += [f"{kept_back} kept back by the gate"] if kept_back else []
        swaps += [f"rolled back {'once' if rolled_back == 1 else f'{rolled_back:.0f} times'}"] if rolled_back else []
        facts["swaps"] = ", ".join(swaps)
        cost, returned = (run.column(f"time/training_{name}_s").sum() for name in ("cost", "return"))
        if cost:
            facts["training"] = f"cost {cost:.1f}s of this run and saved {returned:.1f}s of generation"
        elif trained := run.column("drafter/train_s").sum():
            unknown = "what it added to the run is not known, since there was no step without it"
            facts["training"] = f"took {trained:.1f}s beside the run and saved {returned:.1f}s of generation; {unknown}"
    facts["lossless"] = _lossless(run, greedy_identical)
    facts |= {"speculation": speculation} if speculation else {}
    gain = f"decoding {_from_to(run, SPEEDUP)} times no speculation, by step times measured in this run"
    unknown = "not measured in this run, `cotrain bench` measures it"
    return facts | {"speed": gain if run.column(SPEEDUP).any() else unknown}


def _lossless(run: RunRecord, greedy_identical: bool | None) -> str:
    """What was checked, and on how many tokens. Checks without speculated tokens do not count, unless they failed."""
    passed = run.column("lossless/passed").dropna()
    checks = "1 check" if passed.size == 1 else f"{passed.size} checks"
    tokens, speculated = (run.column(f"lossless/{name}").sum() for name in ("tokens", "speculated_tokens"))
    if failed := (passed == 0).sum():
        checked = f"{failed} of {checks} FAILED"
    elif speculated:
        on = f"{tokens:,.0f} sampled tokens, {speculated:,.0f} of them speculated"
        checked = f"verified on {on} ({checks} in this run)"
    else:
        few = f"no check held {LEAST_SPECULATED} speculated tokens"
        why = "lossless.every is 0" if run.settings.get("lossless.every") == 0 else few
        checked = f"not checked in this run, as {why} (cotrain verify checks the engine)"
    if greedy_identical is None:
        return checked
    same = "identical with and without speculation" if greedy_identical else "DIFFERS: please report this"
    return f"{checked}; greedy output {same}"


def _from_to(run: RunRecord, metric: str, weight: str = "") -> str:
    """Means over the first and the last third of the steps that measured it; single steps scatter too much."""
    values = run.column(metric).dropna()
    if values.empty:
        return "not measured"
    weights, span = run.column(weight).fillna(1)[values.index], max(1, len(values) // 3)
    ends = (slice(span), slice(-span, None))
    return " -> ".join(f"{np.average(values.iloc[end], weights=weights.iloc[end]):.2f}" for end in ends)


def _speculation(run: RunRecord) -> Iterator[Section]:
    if not run.speculates:
        yield Section("Speculation", "This run has no drafter: its rollouts were generated without one.")
        return
    served = {
        "served": run.column(SERVED),
        "expected on unseen rollouts": run.column("rollout/expected_acceptance_length"),
    }
    marks = {kind: [row["step"] for row in run.decisions if row["kind"] == kind] for kind in MARKED}
    title, text = "Acceptance length, served and expected", "Tokens that a verification step of the engine emits."
    yield line_section(title, "acceptance length", text, served, marks=marks, floor="1: no gain")
    rates = {f"token {k}": run.column(f"rollout/acceptance_rate_pos_{k}") for k in range(1, 1 + run.settings[LONGEST])}
    text = "Share of verification steps that accepted all draft tokens up to this position."
    yield line_section("Acceptance by draft position", "accepted share", text, rates)
    for title, prefix, what in (("turn", TURN, "turn"), ("context", CONTEXT, "tokens of context before it, at least")):
        if len(lengths := _family(run, prefix)):
            text = f"Tokens that a verification step emits, by {what}."
            yield line_section(f"Acceptance by {title}", "acceptance length", text, lengths, floor="1: no gain")
    text = "Speed of decoding, by the measured times of engine steps. Prefilling of prompts is left out."
    yield line_section("Speedup, against no speculation", "times as fast", text, {"speed": run.column(SPEEDUP)})
    if DRAFTER in run.settings:
        loss = {"loss": run.column("drafter/loss")}
        yield line_section("Drafter loss", "loss", "Mean training loss of each step.", loss)


def _time(run: RunRecord) -> Iterator[Section]:
    """Times of the stages, idle time of the roles, and the policy lag of a run whose generation is ahead of learning."""
    stages = pd.DataFrame({label: run.column(f"time/{stage}_s") for stage, label in STAGES.items()})
    stages["rest"] = (run.column("time/step_s") - stages.sum(axis="columns")).clip(lower=0.0)
    shares = (stages.sum() / stages.sum().sum())[stages.notna().any()]
    text = "Share of the run: " + ", ".join(f"{label} {share:.0%}" for label, share in shares.items()) + "."
    yield line_section("Time per stage", "seconds a step", text, dict(stages.items()))
    if len(idle := _family(run, "idle/")):
        text = "Share of each step in which a role had nothing to do. The least idle one is the bottleneck."
        if "rollout/tool_share" in run.metrics:
            text += " Engines are idle while all their trajectories wait for tools."
            idle["trajectories in tools"] = run.column("rollout/tool_share")
        yield line_section("Idle time, by role", "share of the step", text, idle)
    if run.settings.get("stream.max_policy_lag"):
        lags = pd.DataFrame(_family(run, "stream/lag_tokens_")).fillna(0)
        shares = lags.div(lags.sum(axis="columns"), axis="index").add_prefix("lag ")
        text = "Policy versions between the one that generated a token and the one that trained on it."
        yield line_section("Policy lag, of the tokens trained on", "share of the tokens", text, dict(shares.items()))


def _family(run: RunRecord, prefix: str) -> dict[str, pd.Series]:
    """The metrics whose names begin with `prefix`, by the rest of the name."""
    return {
        name.removeprefix(prefix): run.metrics[name]
        for name in sorted(run.metrics, key=lambda name: (len(name), name))
        if name.startswith(prefix)
    }
