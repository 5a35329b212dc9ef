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

from cotrain.config.errors import ConfigError, did_you_mean, validated
from cotrain.config.load import Table, load_config, merge, parse_config, read_tables, table_of
from cotrain.config.schema import NAME, RunConfig, default_run_root
from cotrain.run.mlflow_store import URI_VARIABLE, sqlite_uri
from cotrain.run.provenance import flatten
from drafters.config import Section

NO_INIT = "none"

OF_THE_STUDY = ("name", "run_root", "seed", "steps", "checkpoint", "cluster", "drafter.init", "policy.model")
"""Fields and sections that neither an arm nor an initialisation may set."""

NOT_OF_ARMS = (
    *(*OF_THE_STUDY, "init", "task", "tracking", "rollout.prompts_per_step", "rollout.samples_per_prompt"),
    *("rollout.max_prompt_tokens", "rollout.max_new_tokens"),
)
NOT_OF_INITS = (*OF_THE_STUDY, "policy", "stream", "lossless")


class ArmConfig(Section, extra="allow"):
    """One arm. Any other key is a field of the run configuration that this arm sets."""

    name: str = Field(pattern=r"[A-Za-z0-9]")
    """Name in tables and plots. The names of its run folders are made of its letters and digits."""
    init: str | None = None
    """First weights of the drafter: a name of [inits], "none" (random), a checkpoint folder (relative to the study
    file), or a models:/ URI. Default: drafter.init of the shared configuration."""


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
    arms: list[dict[str, Any]] = Field(default_factory=list)
    """The arms, in the order of the tables."""


DATA_FILES = (".json", ".jsonl", ".parquet")
FILES = ("task.path", "init.source.path", "policy.model", "drafter.init")
"""Fields that may hold a path."""

Status = Literal["finished", "failed", "missing"]


@dataclass(eq=False)
class Run:
    """One `cotrain init` or `cotrain train`, and how it ended."""

    command: Literal["init", "train"]
    name: str
    """Name of its arm, or of the initialisation."""
    config: RunConfig
    needs: "Run | None" = None
    """The initialisation it starts from."""
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
    here: Path
    """Folder of the study file."""
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
    shared, folder = load_config([here / file for file in config.config]), config.folder / config.name
    table = shared.model_dump(mode="json")
    for path, file in _files(here, flatten(table)).items():
        table = merge(table, table_of(path, file))
    own: Table = {"run_root": str(folder / "runs")}
    if not (shared.tracking.uri or os.environ.get(URI_VARIABLE)):  # one store, so that MLflow shows all side by side
        own["tracking"] = {"uri": sqlite_uri(folder / "mlflow.db")}
    study = Study(config, here, parse_config(merge(table, own)))
    inits, arms = dict[str, Run](), list[Run]()
    for name, fields in config.inits.items():
        with _collect(problems, f"inits.{name}"):
            inits[name] = Run("init", name, _init_config(study, name, fields))
    for number, fields in enumerate(config.arms, 1):
        with _collect(problems, f"arm {fields.get('name', number)!r}"):
            arms.append(_arm(study, validated(ArmConfig, fields), inits, arms))
    if not arms and not problems:
        problems.append("arms: the study has none; add [[arms]]")
    if problems:
        raise ConfigError(problems)
    study.runs.extend(dict.fromkeys(arm.needs for arm in arms if arm.needs))
    for seed, arm in itertools.product(config.seeds, arms):
        own = {"name": f"{arm.config.name}-s{seed}", "seed": seed}
        study.runs.append(replace(arm, config=arm.config.model_copy(update=own)))
    return study


@contextmanager
def _collect(problems: list[str], where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += [f"{where}: {line}" for line in error.problems]


def _arm(study: Study, given: ArmConfig, inits: dict[str, Run], others: Sequence[Run]) -> Run:
    """The run of an arm, before it gets a seed. Raises ConfigError naming what is invalid or clashes with another arm."""
    config = parse_config(_with_fields(study, given.model_extra or {}, NOT_OF_ARMS))
    if given.init is not None:
        if config.drafter is None:
            raise ConfigError(["init: the arm has no drafter that could start from it; leave it out"])
        drafter = config.drafter.model_copy(update={"init": _init_source(study, given.init)})
        config = config.model_copy(update={"drafter": drafter})
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", given.name).strip("-.")
    for other in others:
        if slug == other.config.name:
            raise ConfigError([f"would share run folders {slug}-s* with {other.name!r}; rename one"])
        if config == other.config.model_copy(update={"name": config.name}):
            raise ConfigError([f"is the same as {other.name!r}; change or remove one"])
    made_by = inits.get(given.init or NO_INIT)
    if (made := made_by and made_by.config.drafter) and config.drafter and made.model != config.drafter.model:
        ours, theirs = (model.model_dump(exclude_none=True) for model in (config.drafter.model, made.model))
        fix = "give both the same drafter.model"
        raise ConfigError([f"init: inits.{given.init} makes a drafter with {theirs}, the arm has {ours}; {fix}"])
    return Run("train", given.name, config.model_copy(update={"name": slug}), made_by)


def _with_fields(study: Study, given: Table, refused: Sequence[str]) -> Table:
    """The shared configuration with the `given` values of fields. As on a command line, "none" unsets a field.

    A key may be a whole path, as in "init.tokens" = 500. Raises ConfigError naming the fields that `refused` rules out.
    """
    fields = flatten(given)
    if fixed := [path for path in fields if any(f"{path}.".startswith(f"{other}.") for other in refused)]:
        fix = "set it in the shared config, or by name, seeds and an arm's init in the study file"
        raise ConfigError([f"{path}: must not differ between runs of a study; {fix}" for path in fixed])
    table = study.shared.model_dump(mode="json")
    # A section is merged before its fields, and `type` before the other fields, since a new type resets the section.
    for path in sorted(fields, key=lambda path: (path.count("."), not path.endswith(".type"))):
        table = merge(table, table_of(path, None if fields[path] == "none" else fields[path]))
    return table


def _init_source(study: Study, init: str) -> str | None:
    """The drafter.init that an arm's `init` stands for. Raises ConfigError naming init."""
    if init == NO_INIT:
        return None
    if init in study.config.inits:
        return str(study.folder / "inits" / init / "drafter")
    if init.startswith("models:/"):
        return init
    if (folder := study.here / Path(init).expanduser()).is_dir():
        return str(folder)
    known = [*study.config.inits, NO_INIT]
    fix = "give one of these names, a checkpoint folder relative to the study file, or models:/NAME@serving"
    hint = did_you_mean(init, known)
    raise ConfigError([f"init: {init!r} is none of {', '.join(known)}, and {folder} is no folder; {fix}{hint}"])


def _init_config(study: Study, name: str, given: Table) -> RunConfig:
    """The configuration of an initialisation. Raises ConfigError naming its invalid fields."""
    if name == NO_INIT:
        raise ConfigError([f"{NO_INIT!r} means random weights; choose another name"])
    fields = flatten(given)
    table = _with_fields(study, fields | _files(study.here, fields), NOT_OF_INITS)
    return parse_config(table | {"name": name, "run_root": str(study.folder / "inits")})


def _files(here: Path, fields: Table) -> Table:
    """Those of FILES that are there, relative to the study file. Others are names, or relative to the working folder.

    Raises ConfigError naming a field with a data file that is in neither folder.
    """
    found: Table = {}
    for path in FILES:
        given = Path(fields.get(path) or "").expanduser()
        if fields.get(path) and (here / given).exists():
            found[path] = str(here / given)
        elif given.suffix in DATA_FILES and not given.exists():
            raise ConfigError([f"{path}: there is no {here / given}; the path is relative to the study file"])
    return found
