"""From a study file to its runs: each initialisation and each arm with every seed, all checked in one pass.

Imports no torch. An arm can set nothing but what is ablated, so that two arms never differ by accident.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from cotrain.config.errors import ConfigError, did_you_mean, validated
from cotrain.config.load import Table, load_config, merge, parse_config, read_tables, table_of
from cotrain.config.schema import RunConfig
from cotrain.run.provenance import flatten
from drafters.config import Section

NO_INIT = "none"


class ArmConfig(Section):
    """One arm. A field that is left out is the shared configuration's."""

    name: str = Field(pattern=r"[A-Za-z0-9]")
    """Name in tables and plots; its run folders are named by its letters and digits."""
    init: str | None = None
    """First weights of the drafter: a name of [inits], "none" (random), a checkpoint folder (relative to the study
    file), or a models:/ URI."""
    model: dict[str, Any] | None = None
    """Fields of drafter.model that differ from the shared configuration; with another `type`, all of them."""
    online: bool | None = None
    """Co-train the drafter (true), or freeze it (false)."""
    policy: Literal["moving", "frozen"] | None = None
    """Train the policy, or keep it as it is (no drift)."""
    num_speculative_tokens: PositiveInt | None = None
    """Draft tokens per verification step (k)."""
    objective: dict[str, Any] | None = None
    """Fields of drafter.objective that differ from the shared configuration."""
    speculation: bool = True
    """False: no drafter, and without `history` the baseline. Such an arm sets no field of the drafter."""
    history: bool = False
    """Draft from past rollouts: beside the drafter, or alone with speculation = false."""
    order: Literal["longest_first", "drawn"] | None = None
    """Which prompts of a step begin first."""
    per_request: bool | None = None
    """With `history`: choose the draft length for each request, or for each batch size alone."""


class StudyConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the study: its folder below `folder`, and its MLflow run."""
    config: tuple[str, ...] = Field(min_length=1)
    """Configuration files shared by all arms, relative to the study file; later ones win."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Every arm runs once with each."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs, to export or measure their policies."""
    folder: Path = Path("runs")
    """Folder of the study's folder, relative to the working directory."""
    inits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Drafters made once by `cotrain init` before the arms: name, and what differs from the shared configuration."""
    arms: list[dict[str, Any]] = Field(default_factory=list)
    """Arms one by one."""


DATA_FILES = (".json", ".jsonl", ".parquet")
INIT_SECTIONS = ("init", "task", "rollout", "drafter", "tracking")
"""What an initialisation may set. It shares the policy with the arms, and must make the drafter they start from."""

Status = Literal["finished", "failed", "missing"]


@dataclass(eq=False)
class Run:
    """One `cotrain init` or `cotrain train`, and how it ended."""

    command: Literal["init", "train"]
    title: str
    config: RunConfig
    needs: "Run | None" = None
    """The initialisation it starts from."""
    status: Status = "missing"
    error: str | None = None

    @property
    def folder(self) -> Path:
        return self.config.run_root / self.config.name

    @property
    def log(self) -> Path:
        """Where its output goes, in the study's folder."""
        return self.config.run_root.parent / "logs" / f"{self.command}-{self.config.name}.log"


@dataclass(eq=False, frozen=True)
class Arm:
    """One combination of what the study varies."""

    name: str
    init: str
    """none (random), a name of the study's [inits] such as generic or in-domain, or the checkpoint given."""
    config: RunConfig
    """The configuration of its runs, but for name and seed."""
    runs: list[Run]
    """One for each seed."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-.")

    def fields(self) -> dict[str, Any]:
        """What tables show of the arm, with everything filled in."""
        config, drafter = self.config, self.config.drafter
        proposers: list[str] = [] if drafter is None else [drafter.model.type]
        proposers += [] if config.rollout.history is None else ["suffix"]
        return {
            "name": self.name,
            "init": self.init,
            "model": " + ".join(proposers) or NO_INIT,
            "online": drafter is not None and drafter.train,
            "policy": "moving" if config.policy.train else "frozen",
            "num_speculative_tokens": config.rollout.num_speculative_tokens if config.speculates else 0,
            "objective": drafter.objective.type if drafter else NO_INIT,
            "speculation": config.speculates,
        }


@dataclass(frozen=True)
class Study:
    config: StudyConfig
    here: Path
    """Folder of the study file."""
    shared: RunConfig
    inits: dict[str, Run] = field(default_factory=dict)
    arms: list[Arm] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.config.folder / self.config.name


def runs_of(arms: Sequence[Arm]) -> list[Run]:
    """Seeds go outside: a study that is stopped early has whole comparisons of fewer seeds."""
    return [run for same_seed in zip(*(arm.runs for arm in arms), strict=True) for run in same_seed]


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
    own: Table = {"run_root": str(folder / "runs")}
    if shared.tracking.uri is None:  # one store for inits/ and runs/, so that all are nested under one run
        own["tracking"] = {"uri": f"sqlite:///{folder / 'mlflow.db'}"}
    study = Study(config, here, parse_config(merge(shared.model_dump(mode="json"), own)))
    for name, fields in config.inits.items():
        with _collect(problems, f"inits.{name}"):
            study.inits[name] = Run("init", f"init {name}", _init_config(study, name, fields))
    for number, fields in enumerate(config.arms, 1):
        with _collect(problems, f"arm {fields.get('name', number)!r}"):
            study.arms.append(_arm(study, validated(ArmConfig, fields)))
    if not study.arms and not problems:
        problems.append("arms: the study has none; add [[arms]]")
    if problems:
        raise ConfigError(problems)
    return study


@contextmanager
def _collect(problems: list[str], where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += [f"{where}: {line}" for line in error.problems]


def _arm(study: Study, given: ArmConfig) -> Arm:
    """Raises ConfigError naming the field when the arm is wrong, alone or beside those before it."""
    config = _arm_config(study, given)
    init = given.init or (config.drafter and config.drafter.init) or NO_INIT
    arm, made_by = Arm(given.name, init, config, []), study.inits.get(init)
    for other in study.arms:
        if arm.slug == other.slug:
            raise ConfigError([f"would share run folders {arm.slug}-s* with {other.name!r}; rename one"])
        if config == other.config:
            raise ConfigError([f"is the same as {other.name!r}; change or remove one"])
    if (made := made_by and made_by.config.drafter) and config.drafter and made.model != config.drafter.model:
        ours, theirs = (model.model_dump(exclude_none=True) for model in (config.drafter.model, made.model))
        fix = "give both the same drafter.model"
        raise ConfigError([f"init: inits.{init} makes a drafter with {theirs}, the arm has {ours}; {fix}"])
    for seed in study.config.seeds:
        own = config.model_copy(update={"name": f"{arm.slug}-s{seed}", "seed": seed})
        arm.runs.append(Run("train", f"{arm.name}, seed {seed}", own, made_by))
    return arm


def _arm_config(study: Study, given: ArmConfig) -> RunConfig:
    shared, drafter = study.shared.model_dump(mode="json"), study.shared.drafter
    if not given.speculation:
        if wrong := given.model_fields_set - {"name", "policy", "speculation", "history", "order", "per_request"}:
            raise ConfigError([f"{name}: an arm without speculation has no drafter; leave it out" for name in wrong])
        shared |= {"drafter": None}
    elif drafter is None:
        raise ConfigError(["speculation: the shared config has no [drafter]; add one, or set speculation = false"])
    else:
        # Not merged as other tables are: there a new `type` would take the other fields back to their defaults.
        shared["drafter"]["objective"] |= given.objective or {}
        shared["drafter"] = merge(shared["drafter"], {"model": given.model or {}})
    proposers = [{"type": shared["drafter"]["model"]["type"]}] if given.speculation else []
    changes = {
        "policy.train": given.policy and given.policy == "moving",
        "rollout.order": given.order,
        "rollout.num_speculative_tokens": given.num_speculative_tokens,
        "rollout.speculation.proposers": [*proposers, {"type": "suffix"}] if given.history else None,
        "rollout.speculation.per_request": given.per_request if given.history else None,
        "drafter.train": given.online,
    }
    for path, value in changes.items():
        shared = merge(shared, table_of(path, value)) if value is not None else shared
    if given.init is not None:
        shared["drafter"]["init"] = _init_source(study, given.init)
    return parse_config(shared)


def _init_source(study: Study, init: str) -> str | None:
    """drafter.init of an arm. Raises ConfigError naming init."""
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
    """Raises ConfigError naming the fields of the initialisation."""
    fields = flatten(given)
    problems = [
        f"{path}: an initialisation shares this with the arms; put {path} in the shared config"
        for path in fields
        if path.split(".")[0] not in INIT_SECTIONS or path.startswith("drafter.init")
    ]
    if name == NO_INIT:
        problems.append(f"{NO_INIT!r} means random weights; choose another name")
    source = fields.get("init.source.path")
    if isinstance(source, str):  # relative to the study file, or a hub id
        file = study.here / Path(source).expanduser()
        if file.exists():
            fields["init.source.path"] = str(file)
        elif source.endswith(DATA_FILES):
            problems.append(f"init.source.path: there is no {file}; the path is relative to the study file")
    if problems:
        raise ConfigError(problems)
    table = study.shared.model_dump(mode="json") | {"name": name, "run_root": str(study.folder / "inits")}
    # A key may be a whole path, as in "init.tokens" = 500. Types come first, since another `type` resets its section.
    for path in sorted(fields, key=lambda path: not path.endswith(".type")):
        table = merge(table, table_of(path, fields[path]))
    return parse_config(table)
