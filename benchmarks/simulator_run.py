"""Does a finished run predict itself? Half of its steps are simulated with what the other half measured.

    python -m benchmarks.simulator_run runs/quickstart

Step times, acceptance and draft lengths come from every other pair of steps, lengths of responses from the pairs between, whose
generation time is predicted. The exit status is 1 if it is off by more than BOUND.
"""

import sys
from pathlib import Path

from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import load_system
from pipelines.simulate.run_base import recorded, table_of

BOUND = 0.10  # largest relative error allowed


def compared(folder: Path) -> tuple[float, float]:
    """Mean seconds of generation of every other pair of steps, predicted from the steps between and measured.

    Pairs, since drafters may train in every second step. Raises ValueError if no prediction can be made.
    """
    run = recorded(folder)
    steps = sorted(run.times["step"])
    if run.config.stream.max_policy_lag:
        raise ValueError(f"{folder}: with stream.max_policy_lag above 0 no step has a time of its own")
    if len(steps) < 4:
        raise ValueError(f"{folder}: {len(steps)} whole steps are too few to hold some out; 4 do")
    known, held = (run.only([n for i, n in enumerate(steps) if i % 4 in places]) for places in ((0, 1), (2, 3)))
    system = load_system(table_of(known) | {"workload": table_of(held)["workload"]})
    return Scenario(system).generation, float(held.busiest.mean())


def main() -> int:
    predicted, measured = compared(Path(sys.argv[1]))
    error = predicted / measured - 1
    said = f"predicted {predicted:.2f} s, measured {measured:.2f} s: {error:+.1%}, bound {BOUND:.0%}"
    print(f"generation of held-out steps: {said}")
    return int(abs(error) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
