"""The study file: arms x seeds on one shared configuration. Imports no torch.

An arm can set nothing but what is ablated, so that two arms never differ by accident.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from cotrain.config.errors import ConfigError, did_you_mean, readable_problems
from cotrain.config.load import Table, merge, read_override, read_toml
from cotrain.run.provenance import flatten
from drafters.config import Section

NO_INIT = "none"


class ArmConfig(Section):
    """One arm. A field that is left out is the shared configuration's."""

    name: str
    """Name in tables and plots."""

    init: str | None = None
    """First weights of the drafter: a name of [inits], "none" (random), a checkpoint folder (relative to the study
    file), or a models:/ URI."""

    model: dict[str, Any] | None = None
    """Fields of drafter.model that differ from the shared configuration; with another `type`, all of them."""

    online: bool | None = None
    """Co-train the drafter (true), or freeze it (false)."""

    policy: Literal["moving", "frozen"] | None = None
    """Train the policy, or keep it as it is (no drift)."""

    draft_tokens: PositiveInt | None = None
    """Draft tokens per verification step (k)."""

    objective: dict[str, Any] | None = None
    """Fields of drafter.objective that differ from the shared configuration."""

    speculation: bool = True
    """False: no drafter at all, the baseline."""


ABLATED = tuple(name for name in ArmConfig.model_fields if name != "name")
DRAFTING = ("init", "model", "online", "draft_tokens", "objective")


class GridConfig(Section):
    """Every combination of these values becomes an arm; a list that is left out is the shared configuration's value."""

    init: tuple[str, ...] = ()
    """As in an arm."""

    model: tuple[dict[str, Any], ...] = ()
    """As in an arm."""

    online: tuple[bool, ...] = ()
    """As in an arm. A frozen drafter with random weights is left out."""

    policy: tuple[str, ...] = ()
    """As in an arm."""

    draft_tokens: tuple[int, ...] = ()
    """As in an arm."""

    objective: tuple[dict[str, Any], ...] = ()
    """As in an arm."""


class StudyConfig(Section):
    """The study file."""

    name: str
    """Name of the study: its folder below `folder`, and its MLflow run."""

    config: tuple[str, ...]
    """Configuration files shared by all arms, relative to the study file; later ones win."""

    seeds: tuple[NonNegativeInt, ...] = (0,)
    """Every arm runs once with each."""

    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs, to export or measure their policies."""

    folder: Path = Path("runs")
    """Folder of the study's folder, relative to the working directory."""

    inits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Drafters made once by `cotrain init` before the arms: name, and what differs from the shared configuration."""

    grid: GridConfig | None = None
    """Arms as combinations."""

    arms: tuple[ArmConfig, ...] = ()
    """Arms one by one."""


def read_study(path: Path, overrides: Sequence[str]) -> tuple[StudyConfig, list[str]]:
    """The file with overrides such as "seeds=[0]", and what is wrong with its arms, which are then left out.

    Raises ConfigError when the file cannot be read or the study's own fields are wrong.
    """
    problems: list[str] = []
    table: Table = {}
    for part in (read_toml(path, problems), *(read_override(text, problems) for text in overrides)):
        table = merge(table, part)
    if problems:
        raise ConfigError(problems)
    raw_arms = table.get("arms", [])
    if not isinstance(raw_arms, list):
        raise ConfigError(["arms: must be a list of tables; write [[arms]] above each"])
    read = [_read_arm(number, raw, problems) for number, raw in enumerate(raw_arms, 1)]
    try:
        config = StudyConfig.model_validate(table | {"arms": [arm for arm in read if arm is not None]})
    except ValidationError as error:
        raise ConfigError([*readable_problems(error, StudyConfig), *problems]) from None
    return config, problems


def is_study(path: Path) -> bool:
    """Whether a TOML file is a study and not a run. Raises ConfigError when it is no TOML file."""
    problems: list[str] = []
    table = read_toml(path, problems)
    if problems:
        raise ConfigError(problems)
    return "config" in table


def grid_arms(grid: GridConfig) -> Iterator[ArmConfig]:
    """Every combination, named by its values; those of the same value in all arms are not in the name.

    Raises ConfigError for values that no arm can have.
    """
    axes = {name: values for name, values in grid if values}
    for combination in itertools.product(*axes.values()):
        fields = dict(zip(axes, combination, strict=True))
        words = [_word(name, value) for name, value in fields.items() if len(axes[name]) > 1 or name == "init"]
        name = ", ".join(words) or "grid"
        try:
            yield ArmConfig.model_validate(fields | {"name": name})
        except ValidationError as error:
            raise ConfigError([f"grid: {line}" for line in readable_problems(error, ArmConfig)]) from None


def _word(name: str, value: Any) -> str:
    if name == "init":
        return "random" if value == NO_INIT else str(value).removeprefix("models:/")
    if name == "online":
        return "co-trained" if value else "frozen"
    if name == "policy":
        return f"{value} policy"
    if name == "draft_tokens":
        return f"k {value}"
    words = " ".join(f"{key} {field}" if key != "type" else str(field) for key, field in value.items())
    return words or f"base {name}"


def _read_arm(number: int, raw: Any, problems: list[str]) -> ArmConfig | None:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        problems.append(f'arms: arm {number} has no name; give it one, for example name = "in-domain, frozen"')
        return None
    where = f"arm {raw['name']!r}"
    known = {key: value for key, value in raw.items() if key in ArmConfig.model_fields}
    strange = {key: value for key, value in raw.items() if key not in known}
    if isinstance(known.get("policy"), dict):  # a field of the policy: policy.clip_low = 0.1
        strange["policy"] = known.pop("policy")
    for path in flatten(strange):
        typo = "" if "." in path else did_you_mean(path, ABLATED)
        fix = typo or f"; put {path} in the shared config"
        problems.append(f"{where}: {path}: arms may differ only in {', '.join(ABLATED)}{fix}")
    try:
        arm = ArmConfig.model_validate(known)
    except ValidationError as error:
        problems += [f"{where}: {line}" for line in readable_problems(error, ArmConfig)]
        return None
    if strange:
        return None
    if arm.speculation:
        return arm
    given = [name for name in DRAFTING if getattr(arm, name) is not None]
    problems += [f"{where}: {name}: an arm without speculation has no drafter; leave it out" for name in given]
    return None if given else arm
