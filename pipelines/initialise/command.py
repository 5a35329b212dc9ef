"""`cotrain init`: its arguments. What it does is in pipelines/initialise/pipeline.py, which takes seconds to import."""

from collections.abc import Sequence

from pipelines.preflight import read_command_line

DESCRIPTION = "Train a drafter on rollouts of the policy, before RL: in-domain initialisation."
EPILOG = """\
Reads [policy], [rollout], [drafter], [task] and [init] of the configuration; see docs/initialisation.md.

  cotrain init configs/smoke.toml name=first-drafter init.tokens=5000
  cotrain init configs/smoke.toml name=other init.source.type=rollouts init.source.path=runs/first-drafter
  cotrain init --resume first-drafter
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    asked = read_command_line("init", argv, DESCRIPTION, EPILOG)
    if asked is None:
        return 0
    from pipelines.initialise.pipeline import initialise

    return initialise(*asked)
