"""The answer: a table of both arms, a line for each question that users ask a simulator, figures, and the cells of a sweep."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from tabulate import tabulate

from cotrain.config.errors import ConfigError, together
from cotrain.simulation.roofline import Roofline
from cotrain.simulation.scenario import TOO_HIGH, Answer, Scenario, generate
from cotrain.simulation.system import LEFT_OUT, System, parse_system


def report(system: System, s: Scenario, found: Answer) -> str:
    mode, engines = f"lag {s.lag}" if s.lag else "synchronous", s.engines
    lines = [
        f"{len(s.flat) / s.steps:.0f} responses of {s.flat.mean():.0f} tokens, {engines.count} engines of {engines.max_num_seqs} slots, {mode}",
        *(f"{name}: {origin}" for name, origin in system.origins.items() if origin.startswith(LEFT_OUT)),
        f"step times: {how_known(s)}\n",
    ]
    if s.generation_overhead:
        lines[0] += f"; {s.generation_overhead:.3g} s more of generation, in which no engine works"
    rows = [{k: rounded(x, s) if isinstance(x, float) else x for k, x in row.items()} for row in arms(s, found)]
    for name, gain in (("generation x", found.generation_speedup), ("step x", found.step_speedup)):
        rows[1][name] = "at most " * s.envelope + "{} ({} to {})".format(*(ratio(number, s) for number in gain))
    lines.append(tabulate(rows, headers="keys", floatfmt=".4g") + "\n")
    answers = _speculation(system, s, found) if s.speculates else ()
    for question, said in (*answers, *_step(s, found)):
        lines.append(fill(f"{question:<14}{said}", 118, subsequent_indent=" " * 14))
    return "\n".join(lines)


def arms(s: Scenario, found: Answer) -> list[dict[str, Any]]:
    """Return a row of numbers for each arm."""
    rows = []
    for name, (g, times) in (("no speculation", found.plain), (arm_name(s), found.arm)):
        row = {"arm": name, "generation s": g.seconds, "step s": times.step_seconds}
        row |= {"exposed s": times.exposed_generation, "mean batch": g.mean_batch, "drafted": g.drafted}
        rows.append(row | {"accepted": g.accepted, "engines busy": g.busy})
    return rows


def arm_name(scenario: Scenario) -> str:
    return f"k={scenario.k}" if isinstance(scenario.k, int) else f"k<={scenario.most_drafted} by batch"


def ratio(value: float, scenario: Scenario) -> str:
    """Format with two decimals, or with one in an envelope."""
    return f"{value:.1f}" if scenario.envelope else f"{value:.2f}"


def _speculation(system: System, s: Scenario, found: Answer) -> Iterator[tuple[str, str]]:
    gain, length, k = found.generation_speedup, found.arm.generation.acceptance_length, s.most_drafted
    ends = np.unique(s.batches[[0, -1]]).astype(float)
    prices = zip(s.step(k, ends) / s.step(0, ends), ends, strict=True)
    at = ", ".join(f"{ratio(price, s)} at batch {size:.0f}" for price, size in prices)
    even = f"{ratio(length / gain.value, s)} ({at})" if isinstance(s.k, int) else f"with k={k} {at}"
    both = [(round(x.low, 6), round(x.high, 6)) for x in (gain, found.step_speedup)]
    verdicts = ["no" if high <= 1 else "yes" if low > 1 and not s.envelope else "not certain" for low, high in both]
    said = f"{verdicts[0]} for generation, {verdicts[1]} for whole steps: acceptance length of drafts {length:.2f}, break-even {even}"
    yield "worth it?", said if k else "no: no draft length pays at any batch size"
    fixed_ones = {k: replace(s, k=k) for k in s.draft_lengths}
    by_length = {k: speedup(each) for k, each in fixed_ones.items()}
    unsure = {k: extrapolated(each) or each.envelope > s.envelope for k, each in fixed_ones.items()}
    fixed = ", ".join(f"{k} {ratio(x, s)}x{' extrapolated' * bool(unsure[k])}" for k, x in by_length.items())
    chosen = s.adaptive(s.draft_lengths[-1])
    changes = [b for b in s.batches.tolist() if b == 1 or chosen.k_at(b) != chosen.k_at(b - 1)]
    by_batch = ", ".join(f"{chosen.k_at(b) or 'off'} from {b}" for b in changes) + f" ({ratio(speedup(chosen), s)}x)"
    best = max(by_length, key=by_length.__getitem__)
    yield "which k?", f"{best} of fixed ones ({fixed}); by batch size: {by_batch}"
    host = s.cost.host if isinstance(s.cost, Roofline) else None
    if host and host.graph_tokens and not host.non_uniform:  # unequal draft lengths leave the graphs at any batch
        bounds = ", ".join(f"{host.graph_tokens // (k + 1)} (k={k})" for k in s.draft_lengths)
        yield "graphs", f"steps leave the captured CUDA graphs above batch {bounds}"
    if not k:
        return
    yield "acceptance", _acceptance(system, s)
    decisive = [f"{name}: {ratio(a, s)}, {ratio(b, s)}" for name, (a, b) in tornado(s).items()]
    yield "what decides", "; ".join(decisive[:4])
    errors = f"step times {s.step_time_error:.0%}, acceptance {s.acceptance_error:.0%}, and other prompts' lengths"
    if s.envelope:
        less, most = (f"{100 * (times - 1):.0f}" for times in TOO_HIGH)
        errors += f"; {ratio(gain.value, s)} is an upper bound, since where no step with such drafts was measured, "
        errors += (
            f"predictions were {less} to {most} % too high: measure one, and give cost.host_draft_ms and cost.drafted_k"
        )
    yield "how sure?", f"80 % of cases within {ratio(gain.low, s)} to {ratio(gain.high, s)}, by errors of {errors}"


def _acceptance(system: System, s: Scenario) -> str:
    """Say how many seconds of a step more acceptance, and training of the drafter, are worth."""
    more, untrained = s.longer(1 + 0.1 / s.length(s.most_drafted)), replace(s, drafter_seconds=0.0)
    own, longer = (each.scheduled(generate(each).seconds).step_seconds for each in (s, more))
    said = f"+0.1 saves {abs(round(own - longer, 6)):.2g} s a step"
    if (training := system.cotraining) and s.acceptance:
        before = generate(s.longer(1 - training.gain / s.acceptance.length())).seconds
        saved = round(untrained.scheduled(before).step_seconds - own, 6)
        spent = f"{training.seconds_per_step:.2g} s {'the step waits for' if training.exposed else 'are hidden'}"
        change = f"shorter: it {'may pay' if s.envelope else 'pays'}" if saved > 0 else "longer: it does not pay"
        said += f"; co-training, whose {spent}, makes a step {abs(saved):.2g} s {change}"
    return said


def _step(s: Scenario, found: Answer) -> Iterator[tuple[str, str]]:
    generation, learning = found.plain.generation.seconds, s.learning - s.drafter_seconds
    if not learning:
        yield "whole step", "generation alone: the system names no seconds of a learner"
        return
    rest = learning + s.generation_overhead
    share, bound = 1 - learning / (generation + rest), ratio(1 + generation / rest, s)
    yield "whole step", f"generation is {share:.0%} of it without lag, so that no drafter gives more than {bound}x"
    times = []
    for each, arm in ((s.without_speculation(), found.plain), (s, found.arm)):
        steps = (replace(each, lag=lag).scheduled(arm.generation.seconds).step_seconds for lag in range(3))
        times.append(", ".join(f"{rounded(step, s):g}" for step in steps))
    left = s.learning - s.generation_overhead
    limit = f"from a speed-up of {ratio(generation / left, s)} on" if left > 0 else "at no speed"
    limit = limit if generation > left else "at any speed"
    text = f"lag 0, 1, 2 on machines of their own: {times[0]} s a step without, {times[1]} s with speculation; "
    yield "with lag", f"{text}the learner is the limit {limit}"


def sweep(system: System, asked: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per combination of the values in `key=0..7` or `key=1,2,4`.

    Raises ConfigError listing every problem, each with the first cell that has it.
    """
    rows, cells = [], dict[str, str]()
    for overrides in itertools.product(*together(*(partial(_overrides, text) for text in asked))):
        try:
            scenario = parse_system(system.given, overrides).build()
        except ConfigError as error:
            for problem in error.problems:
                cells.setdefault(problem, f"--sweep {' '.join(overrides)}: {problem}")
            continue
        arms = (scenario.without_speculation(), scenario)
        generation = [generate(arm).seconds for arm in arms]
        steps = [arm.scheduled(seconds).step_seconds for arm, seconds in zip(arms, generation, strict=True)]
        numbers = {"generation s": generation[1], "generation x": generation[0] / generation[1]}
        numbers |= {"step s": steps[1], "step x": steps[0] / steps[1]}
        row: dict[str, Any] = dict(override.split("=", 1) for override in overrides)
        row |= {name: rounded(number, scenario) for name, number in numbers.items()}
        rows.append(row | {"step times": how_known(scenario)})
    if cells:
        raise ConfigError(list(cells.values()))
    return rows


def rounded(number: float, scenario: Scenario) -> float:
    """Round to four significant digits, or to two in an envelope, which is no more precise."""
    return float(f"{number:.{2 if scenario.envelope else 4}g}")


def _overrides(text: str) -> list[str]:
    key, _, values = text.partition("=")
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", values)
    chosen = [str(n) for n in range(int(ends[1]), int(ends[2]) + 1)] if ends else values.split(",")
    if not key or not chosen or "" in chosen:
        raise ConfigError([f"--sweep {text}: write key=values, for example drafter.k=0..7 or system.engines=8,16"])
    return [f"{key}={value}" for value in chosen]


def how_known(scenario: Scenario) -> str:
    """Where step times come from, and at which batch sizes they are extrapolated."""
    s, known = scenario, str(scenario.cost.origin)
    if s.drafted_k:
        known += f" adjusted to steps with k = {', '.join(map(str, s.drafted_k))}"
    if s.envelope:
        known += f", an envelope: no measured speculating step{' of such k' if s.drafted_k else ''}"
    beyond = extrapolated(s)
    return f"{known}, EXTRAPOLATED at batch {beyond[0]} to {beyond[-1]}" if beyond else known


def extrapolated(s: Scenario) -> list[int]:
    """Batch sizes beyond what was measured."""
    return [b for b in s.batches.tolist() if not (s.cost.covers(s.k_at(b), b) and s.cost.covers(0, b))]


def speedup(scenario: Scenario) -> float:
    """The speed-up of generation."""
    return generate(scenario.without_speculation()).seconds / generate(scenario).seconds


def tornado(scenario: Scenario) -> dict[str, tuple[float, float]]:
    """Speed-up of generation with each input scaled by the two factors in its name, the most decisive input first."""
    s, cost, engines = scenario, scenario.cost, scenario.engines
    most = engines.kv_tokens - s.prompt_tokens if engines.kv_tokens else np.inf
    inputs: dict[str, Callable[[float], Scenario]] = {
        "engines": lambda f: replace(s, engines=replace(engines, count=max(1, round(f * engines.count)))),
        "length of responses": lambda f: replace(
            s, lengths=[[int(min(max(1, f * length), most)) for length in group] for group in s.lengths]
        ),
    }
    if isinstance(cost, Roofline):
        h, host = cost.hardware, cost.host

        def of(**constants: Any) -> Scenario:
            return replace(s, cost=replace(cost, hardware=replace(h, **constants)))

        inputs |= {
            "bandwidth of memory": lambda f: of(memory_bandwidth=f * h.memory_bandwidth),
            "operations a second": lambda f: of(flops={p: f * n for p, n in h.flops.items()}),
            "host time of a draft token": lambda f: of(host=replace(host, draft_s=f * host.draft_s)),
            "host time of a step": lambda f: of(host=replace(host, step_s=f * host.step_s)),
        }
    found = {f"{name} x0.5, x2": (speedup(change(0.5)), speedup(change(2.0))) for name, change in inputs.items()}
    if s.most_drafted:
        name = "acceptance length, or speed of steps with drafts, x0.9, x1.1"
        found[name] = (speedup(s.longer(0.9)), speedup(s.longer(1.1)))
    return dict(sorted(found.items(), key=lambda item: -abs(np.log(item[1][0] / item[1][1]))))


def write_plots(out: Path, s: Scenario, found: Answer) -> None:
    """Write PNGs to this folder: the batch over time, speed-up by draft length and batch size, and what decides the speed-up."""
    import pandas as pd

    from pipelines.page.figures import line_figure, range_figure

    seconds = np.linspace(0, max(arm.generation.seconds for arm in (found.plain, found.arm)), 60)
    running = {}
    for name, arm in (("no speculation", found.plain), (arm_name(s), found.arm)):
        ends, counts = arm.generation.timeline
        each = [
            np.append(n, 0)[np.searchsorted(end, seconds, side="right")]
            for end, n in zip(ends.T, counts.T, strict=True)
        ]
        running[name] = pd.Series(sum(each), seconds)
    figures = {"batch": line_figure(running, "requests running, all engines", "seconds of generation")}
    sizes = s.batches.astype(float)
    speed = {k: pd.Series(s.length(k) * s.step(0, sizes) / s.step(k, sizes), sizes) for k in s.draft_lengths if k}
    if speed:
        lines = {f"k={k}": values for k, values in speed.items()}
        figures["speedup"] = line_figure(lines, "decoding, x no speculation", "requests at once", floor="break-even")
    value, digits = found.generation_speedup.value, 1 if s.envelope else 2
    rows = {name: {"mean": value, "min": min(ends), "max": max(ends)} for name, ends in tornado(s).items()}
    ranges = pd.DataFrame.from_dict(rows, orient="index")
    figures["tornado"] = range_figure(ranges, "speed-up of generation", digits)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=120)
