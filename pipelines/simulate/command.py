"""`cotrain simulate`: what speculation would gain in a step, on a system that is described by hand or was measured by a run."""

from collections.abc import Iterator, Sequence
from textwrap import fill

from tabulate import tabulate

from cotrain.config.errors import ConfigError
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import RooflineCost, System, load_system
from pipelines.help import CommandParser
from pipelines.page.record import find

BLIND, MEASURED = (-0.30, 2.0), (-0.11, 0.20)
"""Least and most relative errors of the speed-ups of generation in docs/measurements/simulator.md: without a measured step with drafts, and
with some."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status. Raises ValueError for a mistake of the user."""
    usage = "cotrain simulate SYSTEM.toml...|--run RUN [key=value...]"
    parser = CommandParser("simulate", System, usage=usage)
    parser.add_argument("given", nargs="*", metavar="SYSTEM.toml|key=value", help="a system; later ones win")
    parser.add_argument("--run", metavar="RUN", help="take the system from a finished run: a folder or a name")
    options = parser.parse_intermixed_args(arguments)
    files = [text for text in options.given if "=" not in text or text.endswith(".toml")]
    overrides = [text for text in options.given if text not in files]
    if bool(files) == (options.run is not None):
        raise ConfigError(["SYSTEM.toml: give a system, for example configs/simulate/cpu.toml, or --run RUN"])
    from pipelines.simulate.run_base import run_system

    system = load_system(files, overrides) if files else run_system(find(options.run), overrides)
    print(report(Scenario(system)))
    return 0


def report(s: Scenario) -> str:
    """Answer all questions about a system."""
    engines, queues, steps = s.system.system, s.queues[s.queues > 0], len(s.system.workload.lengths())
    lines = [
        f"{len(queues) / steps:.0f} responses of {queues.mean():.0f} tokens, {engines.engines} engines of at most "
        f"{len(s.batches)} requests, {f'lag {engines.lag}' if engines.lag else 'synchronous'}",
        fill(f"step times: {_how_known(s)}", 118, subsequent_indent=" " * 12) + "\n",
        tabulate([_row(s.plain), _row(s)], ("arm", "generation s", "x", "step s", "x"), disable_numparse=True) + "\n",
    ]
    answers = [*(_speculation(s) if s.system.drafter and s.system.drafter.k else ()), _step(s)]
    return "\n".join(lines + [fill(f"{name:<14}{said}", 118, subsequent_indent=" " * 14) for name, said in answers])


def _row(s: Scenario) -> list[str]:
    """An envelope has two digits."""
    drafter, k, digits = s.system.drafter, max(s.draft_lengths), 2 if s.envelope else 3
    arm = "no speculation" if not drafter else f"k<={k} by batch" if drafter.adaptive else f"k={k}"
    numbers = s.generation, s.plain.generation / s.generation, s.step(), s.plain.step() / s.step()
    return [arm, *(f"{float(f'{number:.{digits}g}'):g}" for number in numbers)]


def _how_known(s: Scenario) -> str:
    cost, beyond, known = s.system.cost, s.extrapolated, "measured"
    if isinstance(cost, RooflineCost):
        known = "a roofline"
        if cost.cells:
            known += f" with {len(cost.cells)} measured steps ({cost.cells_source or 'source not given'})"
        if cost.drafted_k:
            known += f" adjusted to measured steps with k = {', '.join(map(str, cost.drafted_k))}"
        known += f", {_host(cost)}{', an envelope: no measured step with such drafts' * s.envelope}"
    return f"{known}, EXTRAPOLATED at batch {beyond[0]} to {beyond[-1]}" if beyond else known


def _host(cost: RooflineCost) -> str:
    engine, scheduling = cost.host, {"always": "in all", "without_drafts": "in undrafted", "never": "in no"}
    times = f"{1e3 * engine.host_step_s:.3g} ms of the host a step and {1e3 * engine.host_draft_s:.3g} a draft pass"
    return f"engine {cost.engine}: {times}, asynchronous scheduling {scheduling[engine.async_scheduling]} steps"


def _speculation(s: Scenario) -> Iterator[tuple[str, str]]:
    k, gain, whole = max(s.draft_lengths), s.speedup, s.plain.step() / s.step()
    x, (low, high) = ("{:.1f}x".format, BLIND) if s.envelope else ("{:.2f}x".format, MEASURED)
    verdict = "not known" if s.envelope else "yes" if gain > 1 + high else "not certain"
    most = min(gain / (1 + low), s.acceptance.length(k)) if s.envelope else gain
    verdict = "no" if most <= 1 or whole <= 1 < gain else verdict
    yield "worth it?", f"{verdict}: {x(gain)} for generation, {x(whole)} for whole steps"
    said = f"predictions with{'out' * s.envelope} measured steps with such drafts were {low:+.0%} to {high:+.0%} off"
    yield "how sure?", f"{said}: generation {x(gain / (1 + high))} to {x(gain / (1 + low))}"
    fixed = {n: s.changed("drafter", k=n, adaptive=False) for n in range(1, max(7, k) + 1)}
    fixed = {n: each for n, each in fixed.items() if n <= k or len(each.extrapolated) < len(s.batches)}
    unknown = {n for n, each in fixed.items() if each.extrapolated or each.envelope > s.envelope}
    each = ", ".join(f"{n} {x(fixed[n].speedup)}{' extrapolated' * (n in unknown)}" for n in fixed)
    lengths = s.changed("drafter", k=max(fixed), adaptive=True).draft_lengths
    by_batch = ", ".join(f"{lengths[b] or 'off'} from {b}" for b in s.batches if b == 1 or lengths[b] != lengths[b - 1])
    yield "which k?", f"{max(fixed, key=lambda n: fixed[n].speedup)} of fixed ones ({each}); by batch size: {by_batch}"
    price, halved = s.step_time(k) / s.step_time(0), s.changed("system", engines=2 * s.system.system.engines)
    even = " to ".join(f"{price[i]:.2f} at batch {i + 1}" for i in sorted({0, len(price) - 1}))
    said = f"acceptance length, {s.acceptance.length(k):.2f}, over the time of a step with k={k} to one without, {even}"
    yield "what decides", f"{said}: 10 % of either is 10 % of it; with half the requests an engine {x(halved.speedup)}"


def _step(s: Scenario) -> tuple[str, str]:
    generation, learning = s.plain.generation, s.plain.learning
    if not learning:
        return "whole step", "generation alone: the system has no learner_seconds"
    seconds = [f"{each.step(lag):.{2 if s.envelope else 3}g}" for lag in (0, 1) for each in (s.plain, s)]
    times = [f"{float(text):g} s" for text in seconds]
    limit = f"from a speed-up of {generation / learning:.2f}x on" if generation > learning else "at any speed"
    said = f"without lag {times[0]}, with speculation {times[1]}, and no drafter gives more than"
    said += f" {1 + generation / learning:.2f}x; with lag, on machines of their own, {times[2]} and {times[3]}"
    return "whole step", f"{said}, and the learner is the limit {limit}"
