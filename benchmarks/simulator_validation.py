"""What the simulator predicts of measurements that others published, and of this project's CPU machine.

    python -m benchmarks.simulator_validation     # writes the table of docs/measurements/simulator.md

All measurements are in benchmarks/simulator, each with its source. tests/cotrain/simulation/test_validation.py holds the
predictions to their bounds.
"""

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import System

PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "simulator.md"
BEGIN, END = "<!-- table: python -m benchmarks.simulator_validation -->", "<!-- end of table -->"


class Row(NamedTuple):
    run: str
    drafter: str
    k: int
    length: float
    speedup: float


@cache
def data(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "simulator" / f"{name}.toml").read_text(encoding="utf-8"))


def rows() -> list[Row]:
    """The paper's rows; the first is the one that `by_length` is fitted to."""
    measured = data("paper")["rows"]
    return [Row(run, *row) for run in measured for row in measured[run]["measured"]]


def by_length() -> list[tuple[Row, float]]:
    """Every other row, and its speed-up as the first row's in proportion to the acceptance length."""
    fitted, *others = rows()
    return [(row, fitted.speedup * row.length / fitted.length) for row in others]


def step_of(share: float, generation: float) -> float:
    return 1 / (share / generation + 1 - share)


def amdahl() -> list[tuple[str, float, float]]:
    """Name, and predicted and measured speed-up of a step, from the measured generation times alone."""
    found = []
    for run, stages in data("paper")["stages"].items():
        plain, generation = stages["plain"], stages["speculating"]["generation"]
        share = plain["generation"] / sum(plain.values())
        found.append((f"RL-{run.title()}", step_of(share, plain["generation"] / generation), stages["step_speedup"]))
    return found + [(name, step_of(*shares), step) for name, *shares, step in data("paper")["amdahl"]["rows"]]


def asynchronous() -> tuple[float, float]:
    """Predicted and measured seconds of a step with lag 1 and speculation: the synchronous speed-up, the same learner."""
    measured = data("paper")["asynchronous"]
    plain = measured["plain"]
    speedup, seconds = next(row.speedup for row in rows() if row.run == "think"), 1e3 * plain["step"] / 400
    cost = {"cells": [[0, 1, seconds], [3, 1, 4 * seconds / speedup]]}
    learner = {"learner_seconds": plain["step"] - plain["exposed_generation"], "lag": 1}
    one = System(
        system=learner, cost=cost, workload={"groups": [[[400]]], "prompt_tokens": 0}, drafter={"accept": [1, 1, 1]}
    )
    return Scenario(one).step(), measured["speculating"]["step"]


class Drain(NamedTuple):
    session: str
    drafter: str
    k: int
    predicted: float
    measured: float
    standard_error: float

    @property
    def is_close(self) -> bool:
        """Within 5 % or two standard errors."""
        return abs(self.predicted - self.measured) <= max(0.05 * self.measured, 2 * self.standard_error)


def drains() -> list[Drain]:
    """Speed of a batch that drains from 16 requests to 1, predicted from full batches: the speed-up of its generation."""
    found, cpu = [], data("cpu")
    without = dict(zip(cpu["seconds"]["batch"], cpu["seconds"]["without"], strict=True))
    for session in ("earlier", "later"):
        for drafter, measured in cpu[session]["drain"].items():
            lengths = cpu["acceptance"][drafter]
            for i, length in enumerate(lengths):
                speeds = dict(zip(without, cpu[session]["speed"][drafter][i], strict=True))
                cells = [[0, n, 1e3 * seconds] for n, seconds in without.items()]
                cells += [[i + 1, n, 1e3 * seconds * length / speeds[n]] for n, seconds in without.items()]
                workload = {"groups": [[[4 * n] for n in range(1, 17)]], "prompt_tokens": 0}
                drafting = {"k": i + 1, "accept": np.diff([1.0, *lengths[: i + 1]]).tolist()}
                s = Scenario(System(cost={"cells": cells}, workload=workload, drafter=drafting))
                error = cpu[session]["drain_error"][drafter][i]
                found.append(Drain(session, drafter, i + 1, s.speedup, measured[i], error))
    return found


def size(errors: Iterable[float]) -> tuple[float, float]:
    """Mean and largest absolute value."""
    absolute = np.abs(list(errors))
    return float(absolute.mean()), float(absolute.max())


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def text() -> str:
    def of(predicted: float, measured: float, form: str = ".2f") -> str:
        return f"{predicted:{form}}, measured {measured:{form}} ({predicted / measured - 1:+.1%})"

    lines = [line("what", "predicted"), "|---|---|"]
    lines += [line(f"step from measured generation: {name}", of(*pair)) for name, *pair in amdahl()]
    lines.append(
        line("seconds of a step of Think with lag 1, from the speed-up without lag", of(*asynchronous(), ".1f"))
    )
    for k in ((3,), (5, 7)):
        errors = [predicted / row.speedup - 1 for row, predicted in by_length() if row.k in k]
        mean, largest = size(errors)
        what = f"generation by acceptance length from one row with k = 3: {len(errors)} rows with k = {', '.join(map(str, k))}"
        lines.append(line(what, f"mean {mean:.1%}, largest {largest:.0%} off"))
    for session, drafter in dict.fromkeys((drain.session, drain.drafter) for drain in drains()):
        cells = [drain for drain in drains() if (drain.session, drain.drafter) == (session, drafter)]
        said = ", ".join(f"{d.predicted:.2f} ({d.measured:.2f} +- {d.standard_error:.2f})" for d in cells)
        missed = "" if all(d.is_close for d in cells) else ": **missed**"
        lines.append(line(f"CPU, batch of 16 to 1, k = 1, 2, 3, {drafter} drafter, {session} session", said + missed))
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
