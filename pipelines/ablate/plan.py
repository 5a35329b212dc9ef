"""From a study file to whole configurations: one for every arm, seed and initialisation, all checked in one pass."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.load import Table, load_config, merge, parse_config
from cotrain.config.schema import RunConfig
from cotrain.run.provenance import FREE_FIELDS, flatten
from drafters.config import Section
from pipelines.ablate.config import ABLATED, NO_INIT, ArmConfig, GridConfig, StudyConfig, grid_arms, read_study

REGISTRY = "models:/"
DATA_FILES = (".json", ".jsonl", ".parquet")
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
INIT_SECTIONS = ("init", "task", "rollout", "drafter", "tracking")
"""What an initialisation may set. It shares the policy with the arms, and must make the drafter that they start from."""


@dataclass(frozen=True)
class Arm:
    """One arm with everything filled in."""

    name: str
    init: str
    """A name of [inits], none, or a checkpoint folder or models:/ URI as the study file has it."""
    model: str
    """Type of the drafter, and what differs from the shared configuration; none without speculation."""
    online: bool
    policy: str
    """moving or frozen."""
    draft_tokens: int
    """0 without speculation."""
    objective: str
    """Its type, and what differs from the shared configuration; none without speculation."""
    speculation: bool
    config: RunConfig = field(repr=False)
    """Of any seed."""

    @property
    def slug(self) -> str:
        """The name as part of a folder's name."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-.")


@dataclass(frozen=True)
class Study:
    """A checked study."""

    name: str
    folder: Path
    """The study's own folder."""
    seeds: tuple[int, ...]
    shared: RunConfig
    arms: tuple[Arm, ...]
    inits: dict[str, RunConfig]
    """What `cotrain init` runs, by name."""
    init_changes: dict[str, Table]
    """How each differs from the shared configuration, as the study file has it."""
    left_out: tuple[str, ...]
    """Combinations of the grid that are no arms."""
    keep_checkpoints: bool
    """Keep those of finished runs."""

    def run_config(self, arm: Arm, seed: int) -> RunConfig:
        """What `cotrain train` runs for an arm and a seed."""
        fields = arm.config.model_dump(mode="json")
        return parse_config(fields | {"name": f"{arm.slug}-s{seed}", "seed": seed})

    def fingerprint(self) -> Table:
        """What makes the results of a study folder comparable, as plain data."""
        free = set(FREE_FIELDS) - {"steps"}
        shared = self.shared.model_dump(mode="json", exclude=free | {"seed"})
        arms: Table = {}
        for arm in self.arms:
            drafter = arm.config.drafter
            arms[arm.name] = {name: getattr(arm, name) for name in ABLATED}
            arms[arm.name]["objective"] = drafter.objective.model_dump(mode="json") if drafter else None
            arms[arm.name]["model"] = drafter.model.model_dump(mode="json") if drafter else None
        return {"seeds": list(self.seeds), "shared": shared, "inits": self.init_changes, "arms": arms}


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file; `overrides` are field=value of the study. Raises ConfigError listing all problems.

    Every arm's whole RunConfig is checked here, so that no arm is refused after others have run.
    """
    path = Path(path)
    config, problems = read_study(path, overrides)
    problems += _study_problems(config)
    try:
        shared = load_config([path.parent / file for file in config.config])
    except ConfigError as error:
        raise ConfigError([*problems, *(f"config: {line}" for line in error.problems)]) from None
    folder = config.folder / config.name
    own: Table = {"run_root": str(folder / "runs")}
    if shared.tracking.uri is None:  # one store for inits/ and runs/, so that all are nested under one run
        own["tracking"] = {"uri": f"sqlite:///{folder / 'mlflow.db'}"}
    shared = parse_config(merge(shared.model_dump(mode="json"), own))
    context = _Context(config, path.parent, folder, shared)
    inits = {name: made for name in config.inits if (made := _init_config(context, name, problems)) is not None}
    arms = [arm for given in config.arms if (arm := _arm(context, given, problems)) is not None]
    left_out = []
    try:
        for given in grid_arms(config.grid or GridConfig()) if config.grid else ():
            if (arm := _arm(context, given, problems)) is None:
                continue
            if arm.init == NO_INIT and not arm.online:
                left_out.append(f"{arm.name}: a drafter with random weights that is never trained")
            else:
                arms.append(arm)
    except ConfigError as error:
        problems += error.problems
    problems += [
        *_twins(arms),
        *_other_drafters(arms, inits),
        *([] if arms or problems else ["arms: the study has none; add [[arms]] or a [grid]"]),
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    changes = {name: flatten(given) for name, given in config.inits.items()}
    return Study(
        config.name, folder, config.seeds, shared, tuple(arms), inits, changes, tuple(left_out), config.keep_checkpoints
    )


@dataclass(frozen=True)
class _Context:
    """What arms and initialisations are resolved against."""

    config: StudyConfig
    here: Path
    """Folder of the study file."""
    folder: Path
    shared: RunConfig


def _study_problems(config: StudyConfig) -> Iterator[str]:
    for where, name in (("name", config.name), *(("inits", name) for name in config.inits)):
        if not FOLDER_NAME.fullmatch(name):
            yield f"{where}: {name!r} is no folder name; use letters, digits, '.', '_' and '-'"
    if NO_INIT in config.inits:
        yield f"inits: {NO_INIT!r} means random weights; choose another name"
    if not config.config:
        yield 'config: no shared configuration; name at least one file, for example config = ["base.toml"]'
    if not config.seeds:
        yield "seeds: is empty; give at least one, for example seeds = [0]"
    if len(set(config.seeds)) < len(config.seeds):
        yield f"seeds: {list(config.seeds)} holds a seed twice"


def _twins(arms: Sequence[Arm]) -> Iterator[str]:
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            if arm.name == other.name or arm.slug == other.slug:
                yield f"arms: {other.name!r} and {arm.name!r} would share run folders {arm.slug}-s*; rename one"
            if arm.config == other.config:
                yield f"arms: {other.name!r} and {arm.name!r} are the same; change or remove one"


def _arm(context: _Context, given: ArmConfig, problems: list[str]) -> Arm | None:
    """The arm, or None with what is wrong with it added to `problems`."""
    where, shared = f"arm {given.name!r}", context.shared
    if not re.search(r"[A-Za-z0-9]", given.name):
        problems.append(f"arms: {given.name!r} is no name; use letters or digits, of which its run folders are named")
        return None
    changes: Table = {} if given.policy is None else {"policy": {"train": given.policy == "moving"}}
    init = NO_INIT
    if not given.speculation:
        changes["drafter"] = None
    elif shared.drafter is None:
        problems.append(f"{where}: the shared config has no [drafter]; add one, or set speculation = false")
        return None
    else:
        init = given.init if given.init is not None else shared.drafter.init or NO_INIT
        try:
            source = shared.drafter.init if given.init is None else _init_source(context, given.init)
        except ValueError as error:
            problems.append(f"{where}: {error}")
            return None
        # Not merged as other tables are: there a new `type` would take the other fields back to their defaults.
        objective = shared.drafter.objective.model_dump(mode="json") | (given.objective or {})
        online = shared.drafter.train if given.online is None else given.online
        changes["drafter"] = {"init": source, "train": online, "objective": objective, "model": given.model or {}}
        if given.draft_tokens is not None:
            changes["rollout"] = {"draft_tokens": given.draft_tokens}
    try:
        config = parse_config(merge(shared.model_dump(mode="json"), changes))
    except ConfigError as error:
        problems += [f"{where}: {line}" for line in error.problems]
        return None
    return Arm(
        name=given.name,
        init=init,
        model=_model_text(config, shared),
        online=config.drafter.train if config.drafter else False,
        policy="moving" if config.policy.train else "frozen",
        draft_tokens=config.rollout.draft_tokens if config.drafter else 0,
        objective=_objective_text(config, shared),
        speculation=given.speculation,
        config=config,
    )


def _other_drafters(arms: Sequence[Arm], inits: Mapping[str, RunConfig]) -> Iterator[str]:
    """Arms whose drafter is not the one that their initialisation makes."""
    for arm in arms:
        made = inits[arm.init].drafter if arm.init in inits else None
        if made is not None and arm.config.drafter is not None and made.model != arm.config.drafter.model:
            yield (
                f"arm {arm.name!r}: init: inits.{arm.init} makes a drafter with {_shown(made.model)}, the arm has "
                f"{_shown(arm.config.drafter.model)}; give both the same drafter.model"
            )


def _shown(model: Section) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in model.model_dump(exclude_none=True).items())


def _init_source(context: _Context, init: str) -> str | None:
    """drafter.init of an arm. Raises ValueError naming init."""
    if init == NO_INIT:
        return None
    if init in context.config.inits:
        return str(init_drafter(context.folder, init))
    if init.startswith(REGISTRY):
        return init
    if (folder := context.here / Path(init).expanduser()).is_dir():
        return str(folder)
    known = [*context.config.inits, NO_INIT]
    raise ValueError(
        f"init: {init!r} is none of {', '.join(known)}, and {folder} is no folder; give one of these names (of "
        f"[inits]), a checkpoint folder relative to the study file, or models:/NAME@serving{did_you_mean(init, known)}"
    )


def init_drafter(folder: Path, name: str) -> Path:
    """Where `cotrain init` puts the drafter of an initialisation of the study in `folder`."""
    return folder / "inits" / name / "drafter"


def _model_text(config: RunConfig, shared: RunConfig) -> str:
    if config.drafter is None:
        return "none"
    fields = config.drafter.model.model_dump(mode="json")
    base = shared.drafter.model.model_dump(mode="json") if shared.drafter else {}
    changed = [f"{name} {fields[name]}" for name in fields if name != "type" and fields[name] != base.get(name)]
    return ", ".join([str(fields["type"]), *(changed if fields["type"] == base.get("type") else [])])


def _objective_text(config: RunConfig, shared: RunConfig) -> str:
    if config.drafter is None or shared.drafter is None:
        return "none"
    fields, base = (c.objective.model_dump(mode="json") for c in (config.drafter, shared.drafter))
    changed = [f"{name} {value}" for name, value in fields.items() if name != "type" and value != base[name]]
    return ", ".join([str(fields["type"]), *changed])


def _init_config(context: _Context, name: str, problems: list[str]) -> RunConfig | None:
    """What makes an initialisation, or None with what is wrong with it added to `problems`."""
    where, given = f"inits.{name}", context.config.inits[name]
    changes: Table = {}
    for path, value in flatten(given).items():
        *sections, last = path.split(".")
        table: Table = {last: value}
        for section in reversed(sections):
            table = {section: table}
        changes = merge(changes, table)
    refused = [
        path
        for path in flatten(changes)
        if path.partition(".")[0] not in INIT_SECTIONS or path.startswith("drafter.init")
    ]
    problems += [
        f"{where}: {path}: an initialisation shares this with the arms; put {path} in the shared config"
        for path in refused
    ]
    if context.shared.drafter is None:
        problems.append(f"{where}: the shared config has no [drafter]; add one")
    if refused or context.shared.drafter is None:
        return None
    own = {"name": name, "run_root": str(context.folder / "inits")}
    try:
        _resolve_source(context, changes)
        return parse_config(merge(merge(context.shared.model_dump(mode="json"), changes), own))
    except ConfigError as error:
        problems += [f"{where}: {line}" for line in error.problems]
        return None


def _resolve_source(context: _Context, changes: Table) -> None:
    """Make init.source.path, which is relative to the study file, valid from here. A hub id stays as it is."""
    source: Any = changes.get("init", {}).get("source", {})
    path = source.get("path") if isinstance(source, dict) else None
    if not isinstance(path, str):
        return
    file = context.here / Path(path).expanduser()
    if file.exists():
        source["path"] = str(file)
    elif path.endswith(DATA_FILES) or path.startswith((".", "/", "~")) or source.get("type") == "rollouts":
        raise ConfigError([f"init.source.path: there is no {file}; the path is relative to the study file"])
