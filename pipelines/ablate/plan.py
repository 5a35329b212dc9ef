"""From a study file to whole configurations: one for every arm, seed and initialisation, all checked in one pass."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotrain.config.errors import ConfigError, did_you_mean
from cotrain.config.load import Table, load_config, merge, parse_config
from cotrain.config.schema import RunConfig
from cotrain.run.provenance import flatten
from pipelines.ablate.config import NO_INIT, ArmConfig, StudyConfig, read_arms, read_study
from pipelines.ablate.record import Arm, ArmRun

DATA_FILES = (".json", ".jsonl", ".parquet")
DRAFTING = ("init", "model", "online", "num_speculative_tokens", "objective")
"""Fields of an arm that say something about its drafter."""

INIT_SECTIONS = ("init", "task", "rollout", "drafter", "tracking")
"""What an initialisation may set. It shares the policy with the arms, and must make the drafter they start from."""


@dataclass(frozen=True)
class Study:
    """A checked study."""

    config: StudyConfig
    here: Path
    """Folder of the study file."""
    folder: Path
    """The study's own folder."""
    shared: RunConfig
    arms: list[Arm] = field(default_factory=list)
    arm_configs: dict[str, RunConfig] = field(default_factory=dict)
    """What an arm runs, of any seed, by the arm's name."""
    inits: dict[str, RunConfig] = field(default_factory=dict)
    """What `cotrain init` runs, by name."""

    def run_config(self, arm: Arm, run: ArmRun) -> RunConfig:
        """What `cotrain train` runs for an arm and a seed."""
        fields = self.arm_configs[arm.name].model_dump(mode="json")
        return parse_config(fields | {"name": Path(run.folder).name, "seed": run.seed})


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file; `overrides` are field=value of the study. Raises ConfigError listing all problems.

    Every arm's whole RunConfig is checked here, so that no arm is refused after others have run.
    """
    path = Path(path)
    config = read_study(path, overrides)
    folder, problems = config.folder / config.name, list[str]()
    study = Study(config, path.parent, folder, _shared_config(config, path.parent, folder))
    for name, fields in config.inits.items():
        try:
            study.inits[name] = _init_config(study, name, fields)
        except ConfigError as error:
            problems += [f"inits.{name}: {line}" for line in error.problems]
    for given in read_arms(config, problems):
        try:
            arm_config = _arm_config(study, given)
            arm = _arm(study, given, arm_config)
            _check_beside_others(study, arm, arm_config)
        except ConfigError as error:
            problems += [f"arm {given.name!r}: {line}" for line in error.problems]
            continue
        study.arms.append(arm)
        study.arm_configs[arm.name] = arm_config
    if not study.arms and not problems:
        problems.append("arms: the study has none; add [[arms]] or a [grid]")
    if problems:
        raise ConfigError(problems)
    return study


def _shared_config(config: StudyConfig, here: Path, folder: Path) -> RunConfig:
    try:
        shared = load_config([here / file for file in config.config])
    except ConfigError as error:
        raise ConfigError([f"config: {line}" for line in error.problems]) from None
    own: Table = {"run_root": str(folder / "runs")}
    if shared.tracking.uri is None:  # one store for inits/ and runs/, so that all are nested under one run
        own["tracking"] = {"uri": f"sqlite:///{folder / 'mlflow.db'}"}
    return parse_config(merge(shared.model_dump(mode="json"), own))


def _arm_config(study: Study, given: ArmConfig) -> RunConfig:
    """Raises ConfigError naming the fields of the arm."""
    shared = study.shared
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
        drafter["init"] = _init_source(study, given.init)
    if given.online is not None:
        drafter["train"] = given.online
    num_speculative_tokens = given.num_speculative_tokens or shared.rollout.num_speculative_tokens
    changes |= {"drafter": drafter, "rollout": {"num_speculative_tokens": num_speculative_tokens}}
    return parse_config(merge(shared.model_dump(mode="json"), changes))


def _arm(study: Study, given: ArmConfig, config: RunConfig) -> Arm:
    drafter, shared = config.drafter, study.shared.drafter
    return Arm(
        name=given.name,
        init=(given.init or (shared and shared.init) or NO_INIT) if drafter else NO_INIT,
        model=drafter.model.type if drafter else NO_INIT,
        online=drafter is not None and drafter.train,
        policy="moving" if config.policy.train else "frozen",
        num_speculative_tokens=config.rollout.num_speculative_tokens if drafter else 0,
        objective=drafter.objective.type if drafter else NO_INIT,
        speculation=given.speculation,
        runs=[ArmRun(seed=seed, folder=f"runs/{_slug(given.name)}-s{seed}") for seed in study.config.seeds],
    )


def _slug(name: str) -> str:
    """The name as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")


def _check_beside_others(study: Study, arm: Arm, config: RunConfig) -> None:
    """Raise ConfigError when an arm is one of those before it, or has another drafter than it starts from."""
    for other in study.arms:
        if _slug(arm.name) == _slug(other.name):
            raise ConfigError([f"would share run folders {_slug(arm.name)}-s* with {other.name!r}; rename one"])
        if config == study.arm_configs[other.name]:
            raise ConfigError([f"is the same as {other.name!r}; change or remove one"])
    made = study.inits[arm.init].drafter if arm.init in study.inits else None
    if made is not None and config.drafter is not None and made.model != config.drafter.model:
        ours, theirs = (model.model_dump(exclude_none=True) for model in (config.drafter.model, made.model))
        fix = "give both the same drafter.model"
        raise ConfigError([f"init: inits.{arm.init} makes a drafter with {theirs}, the arm has {ours}; {fix}"])


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
    raise ConfigError(
        [
            f"init: {init!r} is none of {', '.join(known)}, and {folder} is no folder; give one of these names, a "
            f"checkpoint folder relative to the study file, or models:/NAME@serving{did_you_mean(init, known)}"
        ]
    )


def _init_config(study: Study, name: str, given: Table) -> RunConfig:
    """Raises ConfigError naming the fields of the initialisation."""
    flat = flatten(given)
    refused = [path for path in flat if path.split(".")[0] not in INIT_SECTIONS or path.startswith("drafter.init")]
    problems = [
        f"{path}: an initialisation shares this with the arms; put {path} in the shared config" for path in refused
    ]
    if name == NO_INIT:
        problems.append(f"{NO_INIT!r} means random weights; choose another name")
    if study.shared.drafter is None:
        problems.append("the shared config has no [drafter]; add one")
    if problems:
        raise ConfigError(problems)
    changes: Table = {}
    for path, value in flat.items():  # a key may be a whole path, as in "init.tokens" = 500
        changes = merge(changes, functools.reduce(lambda table, key: {key: table}, reversed(path.split(".")), value))
    _resolve_source(study.here, changes)
    own = {"name": name, "run_root": str(study.folder / "inits")}
    return parse_config(merge(merge(study.shared.model_dump(mode="json"), changes), own))


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
