"""`cotrain simulate`: what speculation would gain in a step, on a system that is described by hand or was measured by a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from cotrain.config.errors import ConfigError, help_text
from cotrain.simulation.scenario import answer
from cotrain.simulation.system import System, load_system
from drafters.files import write_json
from pipelines.page.folders import find
from pipelines.simulate.report import arms, report, sweep, write_plots

EPILOG = """\
  cotrain simulate configs/simulate/h100_node.toml drafter.k=2           a system that is described, with another k
  cotrain simulate configs/simulate/cpu.toml --sweep drafter.k=0..3 --sweep system.max_num_seqs=1,4,16
  cotrain simulate --run quickstart k=1                                  a finished run, with another k
  cotrain simulate --run quickstart --check                              predict the run itself; status 1 if that is off

Step times are measured, or a roofline of data sheets. Only measured steps tell what drafts
cost: a roofline that was adjusted to none gives an envelope, and says so. docs/simulator.md has equations and validation.

Fields of a system
==================
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status, 1 if --check finds the run off. Raises ValueError for a mistake of the user."""
    parser = _parser()
    if {"-h", "--help"} & set(arguments):
        parser.epilog = EPILOG + help_text(root=System)
    options = parser.parse_intermixed_args(arguments)
    beside = bool(options.given or options.sweep or options.out)
    if options.check:
        if options.run is None or beside:
            raise ConfigError(["--check: it predicts a run as it was; name the run with --run, and leave out the rest"])
        from pipelines.simulate.run_base import check_run

        return check_run(find(options.run))
    system = _system(options)
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError([f"--out {options.out}: {error.strerror}; name a folder"]) from None
    if options.sweep:
        rows = sweep(system, options.sweep)
        print(tabulate(rows, headers="keys", floatfmt=".3g"))
        if options.out is not None:
            write_json(options.out / "sweep.json", {"base": system.constants(system.build()), "cells": rows})
        return 0
    scenario = system.build()
    found = answer(scenario)
    text = report(system, scenario, found)
    print(text)
    if options.out is not None:
        gains = {"generation": found.generation_speedup._asdict(), "step": found.step_speedup._asdict()}
        about = {"constants": system.constants(scenario), "envelope": scenario.envelope, "arms": arms(scenario, found)}
        write_json(options.out / "simulation.json", about | {"speedups": gains})
        (options.out / "simulation.md").write_text(text + "\n")
        write_plots(options.out, scenario, found)
        print(f"\nwritten to {options.out}/")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cotrain simulate",
        usage="cotrain simulate SYSTEM.toml|--run RUN [key=value...] [--sweep key=values]... [--check] [--out DIR]",
        description="Simulate a step with and without speculation: is it worth it, with which k, and how sure is that?",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("given", nargs="*", metavar="SYSTEM.toml|key=value", help="a system, and fields of it")
    parser.add_argument("--run", metavar="RUN", help="take the system from a finished run: a folder or a name")
    text = "cells for each of these values, 0..7 or 1,2,4; all combinations when given several times"
    parser.add_argument("--sweep", action="append", metavar="key=values", help=text)
    parser.add_argument("--check", action="store_true", help="with --run: predict the run itself from what it measured")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and simulation.json here")
    return parser


def _system(options: argparse.Namespace) -> System:
    files = [text for text in options.given if "=" not in text or text.endswith(".toml")]
    overrides = [text for text in options.given if text not in files]
    if len(files) + (options.run is not None) != 1:
        line = "SYSTEM.toml: give one system, for example configs/simulate/cpu.toml, or --run RUN"
        raise ConfigError([f"{line}; there are {len(files)} and --run" if files and options.run else line])
    if files:
        return load_system(files[0], overrides)
    from pipelines.simulate.run_base import renamed, run_system

    options.sweep = renamed(options.sweep or ())
    return run_system(find(options.run), overrides)
