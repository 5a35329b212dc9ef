"""From a study file to its runs: each initialisation and each arm with every seed, all checked in one pass.

Imports no torch. An arm sets fields of the run configuration, but none that makes runs incomparable.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from cotrain.config.errors import ConfigError, validated
from cotrain.config.load import INIT, Table, merge, parse_config, read_tables, table_of
from cotrain.config.schema import NAME, RunConfig, default_run_root
from cotrain.run.mlflow_store import SQLITE, URI_VARIABLE
from cotrain.run.provenance import flatten
from drafters.config import Section

OF_THE_STUDY = ("name", "run_root", "seed", "checkpoint", "cluster", "policy.model", "tracking.uri")
"""Fields and sections that neither an arm nor an initialisation may set."""

OF_THE_ARMS = (
    *OF_THE_STUDY, "steps", "task",
    *(f"rollout.{name}" for name in ("prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "max_new_tokens")),
)  # fmt: skip
"""Fields and sections that no arm may set."""

FILES = ("task.path", "policy.model", "drafter.init")
"""Fields that may hold a path, which is looked for beside the study file first."""

Status = Literal["finished", "failed", "missing"]


class ArmConfig(Section, extra="allow"):
    """One arm. Any other key is a field of the run configuration that this arm sets."""

    name: str = Field(pattern=r"[A-Za-z0-9]")
    """Name in tables and plots. The names of its run folders are made of its letters and digits."""
    init: str | None = None
    """First weights of the drafter: a name of [inits]. Default: drafter.init of the configuration."""


class StudyConfig(Section):
    name: str = Field(pattern=NAME)
    """Name of the study: its folder below `folder`, and its MLflow run."""
    config: tuple[str, ...] = Field(min_length=1)
    """Configuration files shared by all arms, relative to the study file; later ones win."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Every arm runs once with each seed."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs, to export or measure their policies."""
    folder: Path = Field(default_factory=default_run_root)
    """Parent of the study's folder, relative to the working directory. Default: COTRAIN_RUN_ROOT, or runs."""
    inits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Drafters made once by `cotrain init` before the arms: name, and what differs from the shared configuration."""
    arms: tuple[ArmConfig, ...] = Field(min_length=1)
    """The arms, in the order of the tables."""


@dataclass(eq=False)
class Run:
    """One `cotrain init` or `cotrain train`, and how it ended."""

    command: Literal["init", "train"]
    name: str  # of its arm, or of the initialisation
    config: RunConfig
    needs: "Run | None" = None  # the initialisation it starts from
    status: Status = "missing"
    error: str | None = None

    @property
    def title(self) -> str:
        return f"init {self.name}" if self.command == "init" else f"{self.name}, seed {self.config.seed}"

    @property
    def folder(self) -> Path:
        return self.config.run_root / self.config.name

    @property
    def log(self) -> Path:
        """Where its output goes, in the study's folder."""
        return self.config.run_root.parent / "logs" / f"{self.command}-{self.config.name}.log"


@dataclass(frozen=True)
class Study:
    config: StudyConfig
    here: Path  # folder of the study file
    shared: RunConfig
    runs: list[Run] = field(default_factory=list)
    """In the order in which they run: the initialisations that arms need, then all arms for each seed, so that a study that
    is stopped early still compares all arms, with fewer seeds."""

    @property
    def folder(self) -> Path:
        return self.config.folder / self.config.name

    @property
    def trainings(self) -> list[Run]:
        """The runs of arms."""
        return [run for run in self.runs if run.command == "train"]


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file; `overrides` are field=value of the study, such as "seeds=[0]".

    Every arm's whole RunConfig is checked here, so that no arm is refused after others have run. Raises ConfigError
    listing what is wrong outside of the arms, or else all problems of arms and initialisations.
    """
    here, problems = Path(path).parent, list[str]()
    config = validated(StudyConfig, reduce(merge, read_tables([path], overrides)))
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError([f"seeds: {list(config.seeds)} holds a seed twice"])
    table = reduce(merge, read_tables([here / file for file in config.config], ()))
    if not os.environ.get(URI_VARIABLE):  # one store, so that MLflow shows all side by side
        table = merge({"tracking": {"uri": f"{SQLITE}{config.folder / config.name / 'mlflow.db'}"}}, table)
    table["run_root"] = str(config.folder / config.name / "runs")
    study = Study(config, here, parse_config(_beside(here, table)))
    alone, inits, arms = reduce(merge, read_tables((), INIT)), dict[str, Run](), list[Run]()
    for name, fields in config.inits.items():
        with _collect(problems, f"inits.{name}"):
            place = {"name": name, "run_root": str(study.folder / "inits")}
            inits[name] = Run(
                "init", name, parse_config(_with_fields(study, merge(alone, fields), OF_THE_STUDY) | place)
            )
    for arm in config.arms:
        with _collect(problems, f"arm {arm.name!r}"):
            arms.append(_arm(study, arm, inits, [other.config.name for other in arms]))
    if problems:
        raise ConfigError(problems)
    study.runs.extend(dict.fromkeys(arm.needs for arm in arms if arm.needs))
    for seed, run in itertools.product(config.seeds, arms):
        own = {"name": f"{run.config.name}-s{seed}", "seed": seed}
        study.runs.append(replace(run, config=run.config.model_copy(update=own)))
    return study


@contextmanager
def _collect(problems: list[str], where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += [f"{where}: {line}" for line in error.problems]


def _arm(study: Study, given: ArmConfig, inits: dict[str, Run], slugs: Sequence[str]) -> Run:
    """The run of an arm, before it gets a seed. Raises ConfigError naming what is invalid or clashes with another arm."""
    fields, slug = flatten(given.model_extra or {}), re.sub(r"[^A-Za-z0-9.]+", "-", given.name).strip("-.")
    if slug in slugs:
        raise ConfigError([f"would share run folders {slug}-s* with another arm; rename one"])
    if given.init is not None and given.init not in study.config.inits:
        raise ConfigError([f"init: {given.init!r} is not in [inits]; a drafter of elsewhere is named by drafter.init"])
    if made_by := inits.get(given.init or ""):
        fields["drafter.init"] = str(made_by.folder / "drafter")
    config = parse_config(_with_fields(study, fields, OF_THE_ARMS) | {"name": slug})
    if made_by and config.drafter and made_by.config.drafter and made_by.config.drafter.model != config.drafter.model:
        raise ConfigError([f"init: inits.{given.init} makes a drafter with another drafter.model; give both the same"])
    return Run("train", given.name, config, made_by)


def _with_fields(study: Study, given: Table, of_the_study: Sequence[str]) -> Table:
    """The shared configuration with the `given` values of fields. As on a command line, "none" unsets a field.

    A key may be a whole path, as in "policy.train" = false. Raises ConfigError naming those `of_the_study` among them.
    """
    fields = flatten(given)
    if fixed := [path for path in fields if any(f"{path}.".startswith(f"{other}.") for other in of_the_study)]:
        fix = "set it in the shared config, or by name and seeds in the study file"
        raise ConfigError([f"{path}: must not differ between runs of a study; {fix}" for path in fixed])
    table = study.shared.model_dump(mode="json")
    # A section is merged before its fields, and `type` before the other fields, since a new type resets the section.
    for path in sorted(fields, key=lambda path: (path.count("."), not path.endswith(".type"))):
        table = merge(table, table_of(path, None if fields[path] == "none" else fields[path]))
    return _beside(study.here, table)


def _beside(here: Path, table: Table) -> Table:
    """The table with those of FILES that are beside the study file; others are names, or relative to the working folder."""
    for path, value in flatten(table).items():
        if path in FILES and value and (here / Path(value).expanduser()).exists():
            table = merge(table, table_of(path, str(here / Path(value).expanduser())))
    return table
