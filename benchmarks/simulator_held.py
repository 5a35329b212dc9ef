"""Published systems that the simulator's constants were not fitted to: predicted, published, and a rule of one line beside them.

    python -m benchmarks.simulator_held     # writes their table into docs/measurements/simulator.md

Systems and sources are in benchmarks/simulator/held.toml. The rule says that speed is proportional to the acceptance length. It
needs a row of the same system; so the simulator is also given one, to which the host's time of a draft pass is fitted.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from benchmarks.simulator_validation import data, line, size, write_table
from cotrain.simulation.roofline import Roofline
from cotrain.simulation.system import RooflineCost, load_system

BEGIN, END = "<!-- table: python -m benchmarks.simulator_held -->", "<!-- end of held systems -->"


class Row(NamedTuple):
    k: int
    batch: int
    length: float
    ms: float
    """Milliseconds a token of each request."""

    @property
    def place(self) -> tuple[int, int]:
        return self.k, self.batch


class Held:
    """A system as it was published. Speeds are relative to the fewest draft tokens of the same batch, which is 0 but for G."""

    def __init__(self, name: str):
        self.name, self.entry = name, data("held")[name]
        self._all = [Row(*row) for row in self.entry["measured"]]
        least = min(row.k for row in self._all)
        self._plain = {row.batch: row for row in self._all if row.k == least}
        self.rows = [row for row in self._all if row.k > least]
        self.fitted = {tuple(self.entry["fits"])} if "fits" in self.entry else set()

    @cached_property
    def cost(self) -> Roofline:
        table = {"cost": {"type": "roofline", **self.entry["cost"]}, "workload": {"mean_length": 1}}
        cost = load_system(table).cost
        assert isinstance(cost, RooflineCost)
        times = cost.step_times()
        assert isinstance(times, Roofline)
        return times

    def seconds(self, cost: Roofline, k: int, batch: int) -> float:
        at = np.array([float(batch)])
        return float(cost.base(k, at)[0]) + cost.slope(k) * batch * self.entry["context"]

    def predicted(self, row: Row, cost: Roofline | None = None) -> float:
        """Speed relative to no speculation."""
        plain, cost = self._plain[row.batch], cost or self.cost
        steps = self.seconds(cost, plain.k, row.batch) / self.seconds(cost, row.k, row.batch)
        return self.gain(row) * steps

    def published(self, row: Row) -> float:
        return self._plain[row.batch].ms / row.ms

    def errors(self) -> dict[tuple[int, int], float]:
        """Relative, of the rows that no constant was fitted to."""
        return {
            row.place: self.predicted(row) / self.published(row) - 1
            for row in self.rows
            if row.place not in self.fitted
        }

    def step_errors(self) -> list[float]:
        """Relative errors of step times."""
        if "relative" in self.entry:
            return []
        measured = {row.place: row.ms * row.length / 1e3 for row in self._all if row.place not in self.fitted}
        return [self.seconds(self.cost, k, batch) / seconds - 1 for (k, batch), seconds in measured.items()]

    def host_draft_s(self, known: Row) -> float:
        """Host's time of a draft pass with which this row is predicted exactly, or 0; steps are linear in it."""
        plain = self._plain[known.batch]
        ratio = self.published(known) * plain.length / known.length
        steps = [self.seconds(self.cost, k, known.batch) for k in (plain.k, known.k)]
        return max(0.0, self.cost.engine.host_draft_s + (steps[0] - ratio * steps[1]) / (ratio * known.k - plain.k))

    def row(self, place: Sequence[int]) -> Row:
        return next(row for row in self.rows if row.place == tuple(place))

    def from_one_row(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """Relative errors of all rows but the reference: of the simulator fitted to it, and of the rule."""
        if "reference" not in self.entry:
            return {}, {}
        known = self.row(self.entry["reference"])
        fitted = replace(self.cost, engine=replace(self.cost.engine, host_draft_s=self.host_draft_s(known)))
        others = [row for row in self.rows if row is not known]
        own = {row.place: self.predicted(row, fitted) / self.published(row) - 1 for row in others}
        per_token = self.published(known) / self.gain(known)
        return own, {row.place: per_token * self.gain(row) / self.published(row) - 1 for row in others}

    def gain(self, row: Row) -> float:
        """Acceptance length relative to that of the row which speeds are relative to."""
        return row.length / self._plain[row.batch].length


def systems() -> list[Held]:
    return [Held(name) for name in data("held") if name != "I"]


def whole_step() -> tuple[float, float, float]:
    """Speed-up of the RL step of I: with lag, where generation paces it; without; and published."""
    at = data("held")["I"]
    generation, waiting = (1 - at["decoding"] + at["decoding"] / at["decode_speedup"]), at["waiting"]
    return 1 / max(generation, 1 - waiting), 1 / (waiting * generation + 1 - waiting), at["step_speedup"]


def _line(held: Held, batch: int) -> str:
    rows = [row for row in held.rows if row.batch == batch]
    fitted = [row.place in held.fitted for row in rows]
    predicted = " ".join(f"{held.predicted(row):.2f}{'*' * fit}" for row, fit in zip(rows, fitted, strict=True))
    published = " ".join(f"{held.published(row):.2f}" for row in rows)
    errors = [error for (_, at), error in held.errors().items() if at == batch]
    found = ", ".join(f"{error:+.0%}" for error in errors) if errors else "fitted"
    return line(held.name, str(batch), " ".join(str(row.k) for row in rows), predicted, published, found)


def _summary(held: Held) -> str:
    own, rule = held.from_one_row()
    errors = [[*held.errors().values()], held.step_errors(), [*own.values()], [*rule.values()]]
    sizes = ("{:.1%}, {:.0%}".format(*size(found)) if found else "-" for found in errors)
    return line(held.name, f"{held.entry['what']}: {held.entry['source']}", *sizes)


def text() -> str:
    found = systems()
    head = ("system", "requests", "k", "predicted", "published", "error")
    rows = [_line(held, batch) for held in found for batch in dict.fromkeys(row.batch for row in held.rows)]
    sizes = ("speed", "ms of a step", "speed, fitted to one row", "speed by the rule, from the same row")
    summary = [line("system", "what, source", *sizes), "|---" * 6 + "|", *map(_summary, found)]
    lag, synchronous, published = whole_step()
    said = f"step {lag:.2f} with lag ({lag / published - 1:+.0%}), {synchronous:.2f} without ({synchronous / published - 1:+.0%})"
    return "\n".join(
        [
            line(*head),
            "|---" * 6 + "|",
            *rows,
            "",
            *summary,
            "",
            f"I, whole RL steps: {said}; published {published:.2f}.",
        ]
    )


if __name__ == "__main__":
    write_table(BEGIN, END, text())
