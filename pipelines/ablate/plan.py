"""From a study file to whole configurations: one for every arm, seed and initialisation, all checked in one pass."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.load import Table, load_config, merge, parse_config
from cotrain.config.schema import RunConfig
from cotrain.run.provenance import flatten
from drafters.config import Section
from pipelines.ablate.config import NO_INIT, ArmConfig, StudyConfig, read_arms, read_study
from pipelines.ablate.record import Arm, ArmRun

DATA_FILES = (".json", ".jsonl", ".parquet")
DRAFTING = ("init", "model", "online", "draft_tokens", "objective")
"""Fields of an arm that say something about its drafter."""

INIT_SECTIONS = ("init", "task", "rollout", "drafter", "tracking")
"""What an initialisation may set. It shares the policy with the arms, and must make the drafter that they start from."""


@dataclass(frozen=True)
class Study:
    """A checked study."""

    config: StudyConfig
    folder: Path
    """The study's own folder."""
    shared: RunConfig
    arms: list[Arm]
    arm_configs: dict[str, RunConfig]
    """What an arm runs, of any seed, by the arm's name."""
    inits: dict[str, RunConfig]
    """What `cotrain init` runs, by name."""

    def run_config(self, arm: Arm, run: ArmRun) -> RunConfig:
        """What `cotrain train` runs for an arm and a seed."""
        fields = self.arm_configs[arm.name].model_dump(mode="json")
        return parse_config(fields | {"name": Path(run.folder).name, "seed": run.seed})


@dataclass(frozen=True)
class _Plan:
    """What arms and initialisations are resolved against."""

    config: StudyConfig
    here: Path
    """Folder of the study file."""
    folder: Path
    shared: RunConfig


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file; `overrides` are field=value of the study. Raises ConfigError listing all problems.

    Every arm's whole RunConfig is checked here, so that no arm is refused after others have run.
    """
    path = Path(path)
    config = read_study(path, overrides)
    folder, problems = config.folder / config.name, list[str]()
    plan = _Plan(config, path.parent, folder, _shared_config(config, path.parent, folder))
    inits, arms, arm_configs = dict[str, RunConfig](), list[Arm](), dict[str, RunConfig]()
    for name, given in config.inits.items():
        try:
            inits[name] = _init_config(plan, name, given)
        except ConfigError as error:
            problems += [f"inits.{name}: {line}" for line in error.problems]
    for given_arm in read_arms(config, problems):
        try:
            arm_config = _arm_config(plan, given_arm)
        except ConfigError as error:
            problems += [f"arm {given_arm.name!r}: {line}" for line in error.problems]
            continue
        arm = _arm(plan, given_arm, arm_config)
        problems += _problems_between(arm, arm_config, arms, arm_configs, inits)
        arms.append(arm)
        arm_configs[arm.name] = arm_config
    if not arms and not problems:
        problems.append("arms: the study has none; add [[arms]] or a [grid]")
    if problems:
        raise ConfigError(problems)
    return Study(config, folder, plan.shared, arms, arm_configs, inits)


def _shared_config(config: StudyConfig, here: Path, folder: Path) -> RunConfig:
    try:
        shared = load_config([here / file for file in config.config])
    except ConfigError as error:
        raise ConfigError([f"config: {line}" for line in error.problems]) from None
    own: Table = {"run_root": str(folder / "runs")}
    if shared.tracking.uri is None:  # one store for inits/ and runs/, so that all are nested under one run
        own["tracking"] = {"uri": f"sqlite:///{folder / 'mlflow.db'}"}
    return parse_config(merge(shared.model_dump(mode="json"), own))


def _arm_config(plan: _Plan, given: ArmConfig) -> RunConfig:
    """Raises ConfigError naming the fields of the arm."""
    shared = plan.shared
    changes: Table = {} if given.policy is None else {"policy": {"train": given.policy == "moving"}}
    if not given.speculation:
        if wrong := [name for name in DRAFTING if getattr(given, name) is not None]:
            raise ConfigError([f"{name}: an arm without speculation has no drafter; leave it out" for name in wrong])
        return parse_config(merge(shared.model_dump(mode="json") | {"drafter": None}, changes))
    if shared.drafter is None:
        raise ConfigError(["speculation: the shared config has no [drafter]; add one, or set speculation = false"])
    # Not merged as other tables are: there a new `type` would take the other fields back to their defaults.
    objective = shared.drafter.objective.model_dump(mode="json") | (given.objective or {})
    drafter: Table = {"objective": objective, "model": given.model or {}}
    if given.init is not None:
        drafter["init"] = _init_source(plan, given.init)
    if given.online is not None:
        drafter["train"] = given.online
    draft_tokens = given.draft_tokens or shared.rollout.draft_tokens
    changes |= {"drafter": drafter, "rollout": {"draft_tokens": draft_tokens}}
    return parse_config(merge(shared.model_dump(mode="json"), changes))


def _arm(plan: _Plan, given: ArmConfig, config: RunConfig) -> Arm:
    drafter, shared = config.drafter, plan.shared.drafter
    return Arm(
        name=given.name,
        init=(given.init or (shared and shared.init) or NO_INIT) if drafter else NO_INIT,
        model=_described(drafter and drafter.model, shared and shared.model),
        online=drafter is not None and drafter.train,
        policy="moving" if config.policy.train else "frozen",
        draft_tokens=config.rollout.draft_tokens if drafter else 0,
        objective=_described(drafter and drafter.objective, shared and shared.objective),
        speculation=given.speculation,
        runs=[ArmRun(seed=seed, folder=f"runs/{_slug(given.name)}-s{seed}") for seed in plan.config.seeds],
    )


def _slug(name: str) -> str:
    """The name as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")


def _described(section: Section | None, shared: Section | None) -> str:
    """The type of a section, and its fields that differ from the shared configuration's."""
    if section is None or shared is None:
        return "none"
    fields, base = section.model_dump(mode="json"), shared.model_dump(mode="json")
    changed = [f"{name} {fields[name]}" for name in fields.keys() & base.keys() if fields[name] != base[name]]
    return ", ".join([fields["type"], *sorted(text for text in changed if not text.startswith("type "))])


def _problems_between(
    arm: Arm, config: RunConfig, arms: Sequence[Arm], arm_configs: dict[str, RunConfig], inits: dict[str, RunConfig]
) -> Iterator[str]:
    """What is wrong with an arm beside those before it, and with the drafter it starts from."""
    for other in arms:
        if _slug(arm.name) == _slug(other.name):
            yield f"arms: {other.name!r} and {arm.name!r} would share run folders {_slug(arm.name)}-s*; rename one"
        if config == arm_configs[other.name]:
            yield f"arms: {other.name!r} and {arm.name!r} are the same; change or remove one"
    made = inits[arm.init].drafter if arm.init in inits else None
    if made is not None and config.drafter is not None and made.model != config.drafter.model:
        ours, theirs = (model.model_dump(exclude_none=True) for model in (config.drafter.model, made.model))
        yield (
            f"arm {arm.name!r}: init: inits.{arm.init} makes a drafter with {theirs}, the arm has {ours}; give both the "
            "same drafter.model"
        )


def _init_source(plan: _Plan, init: str) -> str | None:
    """drafter.init of an arm. Raises ConfigError naming init."""
    if init == NO_INIT:
        return None
    if init in plan.config.inits:
        return str(plan.folder / "inits" / init / "drafter")
    if init.startswith("models:/"):
        return init
    if (folder := plan.here / Path(init).expanduser()).is_dir():
        return str(folder)
    known = [*plan.config.inits, NO_INIT]
    raise ConfigError(
        [
            f"init: {init!r} is none of {', '.join(known)}, and {folder} is no folder; give one of these names (of "
            f"[inits]), a checkpoint folder relative to the study file, or models:/NAME@serving{did_you_mean(init, known)}"
        ]
    )


def _init_config(plan: _Plan, name: str, given: Table) -> RunConfig:
    """Raises ConfigError naming the fields of the initialisation."""
    flat = flatten(given)
    refused = [path for path in flat if path.split(".")[0] not in INIT_SECTIONS or path.startswith("drafter.init")]
    problems = [
        f"{path}: an initialisation shares this with the arms; put {path} in the shared config" for path in refused
    ]
    if name == NO_INIT:
        problems.append(f"{NO_INIT!r} means random weights; choose another name")
    if plan.shared.drafter is None:
        problems.append("the shared config has no [drafter]; add one")
    if problems:
        raise ConfigError(problems)
    changes: Table = {}
    for path, value in flat.items():  # a key may be a whole path, as in "init.tokens" = 500
        changes = merge(changes, functools.reduce(lambda table, key: {key: table}, reversed(path.split(".")), value))
    _resolve_source(plan.here, changes)
    own = {"name": name, "run_root": str(plan.folder / "inits")}
    return parse_config(merge(merge(plan.shared.model_dump(mode="json"), changes), own))


def _resolve_source(here: Path, changes: Table) -> None:
    """Make init.source.path, which is relative to the study file, valid from here. A hub id stays as it is."""
    source: Any = changes.get("init", {}).get("source", {})
    path = source.get("path") if isinstance(source, dict) else None
    if not isinstance(path, str):
        return
    file = here / Path(path).expanduser()
    if file.exists():
        source["path"] = str(file)
    elif path.endswith(DATA_FILES):
        raise ConfigError([f"init.source.path: there is no {file}; the path is relative to the study file"])
