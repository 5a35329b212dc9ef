"""The table of docs/simulator.md: predictions of the simulator beside what was measured.

    python -m benchmarks.simulator_table              # writes it between the page's two markers
    python -m benchmarks.simulator_table --draws 16   # prints its first table, of 16 draws of response lengths

tests/cotrain/simulation/test_paper.py compares page and table.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulator_validation import (
    LEVELS,
    amdahl,
    asynchronous,
    drains,
    law_of_projection,
    long_drafts,
    own_projection,
    prediction,
    rows,
    short_drafts,
    single_step,
    size,
    surface_errors,
    workloads,
)
from cotrain.simulation.roofline import tables

PAGE = Path(__file__).parent.parent / "docs" / "simulator.md"
BEGIN, END = "<!-- table: python -m benchmarks.simulator_table -->", "<!-- end of table -->"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(header: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([line(*header), "|---" * len(header) + "|", *lines])


def paper_table(draws: int | None = None) -> str:
    """draws: of response lengths; by default those of paper.toml."""
    found, levels = prediction(draws=draws) if draws else prediction(), range(len(LEVELS))
    lines = []
    for key, row in rows().items():
        cells = [
            f"{found.speedups[level][key]:.2f} " + (f"({errors[key]:+.0%})" if key in errors else "(fitted)")
            for level in levels
            if (errors := found.errors(level)) is not None
        ]
        lines.append(line(row.run.title(), row.drafter, str(row.k), f"{row.length:.2f}", f"{row.speedup:.2f}", *cells))
    for name, keys in (("EAGLE-3, k = 3", short_drafts()), ("k > 3", long_drafts()), ("all rows", set(rows()))):
        sizes = [size(found.errors(level, keys).values()) for level in levels]
        cells = [f"{mean:.1%}, {largest:.0%}" for mean, largest in sizes]
        lines.append(line(f"**mean, largest error: {name}**", "", "", "", "", *cells))
    steps = [", ".join(f"{error:+.1%}" for error in errors) for errors in found.steps]
    lines.append(line("**step, Zero and Think, k = 3**", "DAPO", "3", "", "1.41, 1.35", *steps))
    return table(("run", "drafter", "k", "acceptance length", "measured", *LEVELS), lines)


def workload_table() -> str:
    header = ["requests an engine", "limit", "host a step, ms", "mean length: Zero, Think", "host a draft pass, ms"]
    header += ["no drafted row: Zero, k = 3", "one drafted row: the other k = 3", "steps"]
    lines = []
    for workload, found in workloads():
        mean, largest = size(found.errors(1, short_drafts()).values())
        lines.append(
            line(
                str(workload.requests),
                f"{workload.limit:,}",
                f"{workload.step_s * 1e3:.1f}",
                ", ".join(f"{length:,.0f}" for length in found.mean_lengths.values()),
                f"{found.costs[1].host.draft_s * 1e3:.2f}",
                f"{found.errors(0)['zero', 0]:+.0%}",
                f"mean {mean:.1%}, largest {largest:.0%}",
                ", ".join(f"{error:+.1%}" for error in found.steps[1]),
            )
        )
    return table(header, lines)


def projection_table() -> str:
    own = own_projection()
    lines = []
    for i, (k, length, *paper) in enumerate(tables("paper")["projection"]["cells"]):
        pairs = [paper, law_of_projection()[i], *(speedups[i] for speedups in own.values())]
        cells = [f"{generation:.2f}, {step:.2f}" for generation, step in pairs]
        lines.append(line(f"k = {k}, acceptance length {length:g}", *cells))
    return table(("cell", "its simulator", "1 + 0.0335 k", *own), lines)


def other_table() -> str:
    steps, ratios = surface_errors()
    (mean, largest), (of_ratio, _) = size(steps), size(ratios)
    predicted, measured = single_step()
    lines = [
        line(
            f"{len(steps)} steps of Llama-3.1-8B on an H100 (SpecDecode-Bench)",
            f"seconds: mean {mean:.1%}, largest {largest:.0%}",
            "10 %, 25 %",
        ),
        line("the same over k = 0", f"mean {of_ratio:.1%}, bias {ratios.mean():+.1%}", "10 %"),
        line(
            "a step of 32 requests of Qwen3-32B on two H100, k = 0",
            f"{predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms ({predicted / measured - 1:+.0%})",
            "",
        ),
    ]
    for name, predicted, measured in amdahl():
        result = f"{predicted:.2f}, measured {measured:.2f} ({predicted / measured - 1:+.1%})"
        lines.append(line(f"step from measured generation: {name}", result, "3.5 %"))
    predicted, measured = asynchronous()
    result = f"{predicted:.1f} s, measured {measured:.1f} s ({predicted / measured - 1:+.0%})"
    lines.append(line("step of Think with lag 1, from the speed-up without lag", result, ""))
    for session, drafter in (("earlier", "good"), ("earlier", "bad"), ("later", "good"), ("later", "bad")):
        cells = [drain for drain in drains() if (drain.session, drain.drafter) == (session, drafter)]
        result = ", ".join(f"{d.predicted:.2f} ({d.measured:.2f} +- {d.standard_error:.2f})" for d in cells)
        bound = "5 % or two standard errors" + ("" if all(d.is_close for d in cells) else ": **missed**")
        lines.append(line(f"CPU, batch of 16 to 1, k = 1, 2, 3, {drafter} drafter, {session} session", result, bound))
    return table(("what", "predicted", "bound"), lines)


def text() -> str:
    return "\n\n".join(
        [
            "Speed-up of generation in arXiv 2604.26779:",
            paper_table(),
            "The same for other workloads that meet the rows without speculation as well:",
            workload_table(),
            "Its projection for Qwen3-235B-A22B on 512 GB200 (generation, step). No run of that size has been published:",
            projection_table(),
            "All else:",
            other_table(),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator_table")
    parser.add_argument("--draws", type=int, help="print the first table, of so many draws of response lengths")
    if draws := parser.parse_args().draws:
        print(paper_table(draws))
        return 0
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
