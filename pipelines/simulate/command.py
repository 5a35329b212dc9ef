"""`cotrain simulate`: what speculation would gain in a step, on a system that is described by hand or was measured by a run."""

from collections.abc import Sequence

from cotrain.config.errors import ConfigError
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import System, load_system
from pipelines.help import CommandParser
from pipelines.page.record import find
from pipelines.simulate.report import report


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status, 1 if --check finds the run off. Raises ValueError for a mistake of the user."""
    usage = "cotrain simulate SYSTEM.toml...|--run RUN [key=value...] [--check]"
    parser = CommandParser("simulate", System, usage=usage)
    parser.add_argument("given", nargs="*", metavar="SYSTEM.toml|key=value", help="a system; later ones win")
    parser.add_argument("--run", metavar="RUN", help="take the system from a finished run: a folder or a name")
    parser.add_argument("--check", action="store_true", help="with --run: predict the run itself from what it measured")
    options = parser.parse_intermixed_args(arguments)
    files = [text for text in options.given if "=" not in text or text.endswith(".toml")]
    overrides = [text for text in options.given if text not in files]
    if bool(files) == (options.run is not None):
        raise ConfigError(["SYSTEM.toml: give a system, for example configs/simulate/cpu.toml, or --run RUN"])
    from pipelines.simulate.run_base import BOUND, compared, run_system

    if options.check:
        if files or overrides:
            raise ConfigError(["--check: it predicts a run as it was; name the run with --run, and leave out the rest"])
        predicted, measured = compared(find(options.run))
        error = predicted / measured - 1
        said = f"predicted {predicted:.2f} s, measured {measured:.2f} s: {error:+.1%}, bound {BOUND:.0%}"
        print(f"generation of held-out steps: {said}")
        return int(abs(error) > BOUND)
    system = load_system(files, overrides) if files else run_system(find(options.run), overrides)
    print(report(Scenario(system)))
    return 0
