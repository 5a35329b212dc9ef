"""The study file: arms x seeds on one shared configuration. Imports no torch.

An arm can set nothing but what is ablated, so that two arms never differ by accident.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from cotrain.config.errors import ConfigError, readable_problems
from cotrain.config.load import merge, read_tables
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
    """False: no drafter at all, the baseline. Such an arm sets no field of the drafter."""


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


def read_study(path: Path, overrides: Sequence[str]) -> StudyConfig:
    """The file with overrides such as "seeds=[0]". Raises ConfigError listing what is wrong outside of its arms."""
    try:
        config = StudyConfig.model_validate(functools.reduce(merge, read_tables([path], overrides)))
    except ValidationError as error:
        raise ConfigError(readable_problems(error, StudyConfig)) from None
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError([f"seeds: {list(config.seeds)} holds a seed twice"])
    return config


def read_arms(config: StudyConfig, problems: list[str]) -> Iterator[ArmConfig]:
    """The arms one by one; what is wrong with an arm is added to `problems` instead."""
    for number, fields in enumerate(config.arms, 1):
        try:
            yield ArmConfig.model_validate(fields)
        except ValidationError as error:
            where = f"arm {fields.get('name', number)!r}"
            problems += [f"{where}: {line}" for line in readable_problems(error, ArmConfig)]
