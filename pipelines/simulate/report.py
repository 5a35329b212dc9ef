"""The answer in words: a table of both arms, and a line for each question that one asks of a simulator."""

from collections.abc import Iterator
from dataclasses import replace
from textwrap import fill
from typing import Any

import numpy as np
from tabulate import tabulate

from cotrain.simulation.scenario import Answer, Estimate, Scenario
from cotrain.simulation.schedule import cotraining_saves
from cotrain.simulation.system import System
from pipelines.simulate.sweep import how_known, rounded, speedup, tornado

MOST_LAG = 4


def report(system: System, s: Scenario, found: Answer) -> str:
    mode, engines = f"lag {s.lag}" if s.lag else "synchronous", s.engines
    lines = [
        f"{len(s.flat) / s.steps:.0f} responses of {s.flat.mean():.0f} tokens, {engines.count} engines of {engines.max_num_seqs} slots, {mode}",
        f"step times: {how_known(s)}\n",
    ]
    rows = [{k: rounded(x, s) if isinstance(x, float) else x for k, x in row.items()} for row in arms(s, found)]
    rows[1] |= {"generation x": _interval(found.generation_speedup, s), "step x": _interval(found.step_speedup, s)}
    lines.append(tabulate(rows, headers="keys", floatfmt=".4g") + "\n")
    answers = _speculation(system, s, found) if s.acceptance and s.most_drafted else ()
    for question, said in (*answers, *_step(s, found)):
        lines.append(fill(f"{question:<14}{said}", 118, subsequent_indent=" " * 14))
    return "\n".join(lines)


def arms(s: Scenario, found: Answer) -> list[dict[str, Any]]:
    """The numbers of both arms."""
    return [
        {
            "arm": name,
            "generation s": arm.generation.seconds,
            "step s": arm.schedule.step_seconds,
            "exposed s": arm.schedule.exposed_generation,
            "mean batch": arm.generation.mean_batch,
            "drafted": arm.generation.drafted,
            "accepted": arm.generation.accepted,
            "engines busy": arm.generation.busy,
        }
        for name, arm in (("no speculation", found.plain), (arm_name(s), found.arm))
    ]


def over_lag(s: Scenario, found: Answer) -> dict[str, list[float]]:
    """Seconds of a step at lag 0 and on, by arm."""
    arms = {"no speculation": (s.without_speculation(), found.plain), arm_name(s): (s, found.arm)}
    return {
        name: [each.scheduled(np.array([arm.generation.seconds]), lag).step_seconds for lag in range(MOST_LAG + 1)]
        for name, (each, arm) in arms.items()
    }


def arm_name(scenario: Scenario) -> str:
    return f"k={scenario.k}" if isinstance(scenario.k, int) else f"k<={scenario.most_drafted} by batch"


def ratio(value: float, scenario: Scenario) -> str:
    """Without a third digit in an envelope."""
    return f"{value:.1f}" if scenario.envelope else f"{value:.2f}"


def _interval(gain: Estimate, s: Scenario) -> str:
    return "{} ({} to {})".format(*(ratio(number, s) for number in gain))


def _speculation(system: System, s: Scenario, found: Answer) -> Iterator[tuple[str, str]]:
    gain, run = found.generation_speedup, found.arm.generation
    length, ends = run.acceptance_length, s.batches[[0, -1]].astype(float)
    prices = s.step(s.most_drafted, ends) / s.step(0, ends)
    at = ", ".join(f"{ratio(price, s)} at batch {size:.0f}" for price, size in zip(prices, ends, strict=True))
    verdict = "yes" if gain.low > 1 else "no" if gain.high < 1 else "not certain"
    yield "worth it?", f"{verdict}: acceptance length {length:.2f}, break-even {ratio(length / gain.value, s)} ({at})"
    by_length = {k: speedup(replace(s, k=k)) for k in s.draft_lengths}
    fixed = ", ".join(f"{k} {ratio(x, s)}x" for k, x in by_length.items())
    chosen = s.adaptive(s.draft_lengths[-1])
    changes = [b for b in s.batches.tolist() if b == 1 or chosen.k_at(b) != chosen.k_at(b - 1)]
    by_batch = ", ".join(f"{chosen.k_at(b) or 'off'} from {b}" for b in changes)
    best = max(by_length, key=by_length.__getitem__)
    yield "which k?", f"{best} of fixed ones ({fixed}); by batch size: {by_batch} ({ratio(speedup(chosen), s)}x)"
    if graphs := system.config.system.graph_tokens:
        bounds = ", ".join(f"{graphs // (k + 1)} (k={k})" for k in s.draft_lengths)
        yield "graphs", f"steps leave the captured CUDA graphs above batch {bounds}"
    saved = f"+0.1 saves {cotraining_saves(run.seconds, length, length + 0.1):.2g} s a step"
    if training := system.config.cotraining:
        before, cost = max(1.0, length - training.gain), training.seconds_per_step
        gained = cotraining_saves(run.seconds * length / before, before, length)
        pays = "pays" if not training.exposed or gained > cost else "does not pay"
        where = "which the step waits for" if training.exposed else "hidden"
        saved += f"; co-training saves {gained:.2g} s for {cost:.2g} s, {where}: it {pays}"
    yield "acceptance", saved
    decisive = [f"{name}: {ratio(a, s)}, {ratio(b, s)}" for name, (a, b) in tornado(s).items()]
    yield "what decides", "; ".join(decisive[:4])
    errors = f"step times {s.step_time_error:.0%}, acceptance {s.acceptance_error:.0%}, and other prompts' lengths"
    yield "how sure?", f"80 % of cases within {ratio(gain.low, s)} to {ratio(gain.high, s)}, by errors of {errors}"


def _step(s: Scenario, found: Answer) -> Iterator[tuple[str, str]]:
    generation, learning = found.plain.generation.seconds, s.learning - s.drafter_seconds
    if not learning:
        yield "whole step", "generation alone: the system names no seconds of a learner"
        return
    share, bound = generation / (generation + learning), ratio(1 + generation / learning, s)
    yield "whole step", f"generation is {share:.0%} of it without lag, so that no drafter gives more than {bound}x"
    times = [", ".join(f"{rounded(t, s):g}" for t in each[:3]) for each in over_lag(s, found).values()]
    limit = f"from a speed-up of {ratio(generation / s.learning, s)} on" if generation > s.learning else "at any speed"
    text = f"lag 0, 1, 2 on machines of their own: {times[0]} s a step without, {times[1]} s with speculation; "
    yield "with lag", f"{text}the learner is the limit {limit}"
