"""Every checked-in configuration loads, and the schema keeps what it promises."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cotrain.config.errors import SectionHelp, help_text, walk_sections
from cotrain.config.load import ConfigError, load_config, parse_config
from cotrain.config.schema import RunConfig
from cotrain.tasks.base import build_score, build_task
from drafters.config import Section
from pipelines.ablate.plan import ArmConfig, StudyConfig, load_study

ROOT = Path(__file__).parent.parent
FILES = sorted(ROOT.glob("configs/**/*.toml"))
STUDIES = [path for path in FILES if "config" in tomllib.loads(path.read_text())]
CONFIGS = [path for path in FILES if path not in STUDIES and path.parent.name != "simulate"]
SECTIONS = list(walk_sections())
MOST_FIELDS = 125

EXAMPLE: dict[str, Any] = {
    "name": "first",
    "steps": 4,
    "policy": {"model": "bundled:smollm2-135m-instruct"},
    "drafter": {"model": {"type": "eagle3"}},
    "task": {"type": "reasoning_gym", "name": "chain_sum"},
}


def section_id(block: SectionHelp) -> str:
    """For pytest: path and kind."""
    return f"{block.path or 'top'}{f'-{block.kind}' if block.kind else ''}"


def test_there_are_configurations() -> None:
    assert ROOT / "configs" / "smoke.toml" in CONFIGS
    assert ROOT / "configs" / "studies" / "initialisation" / "study.toml" in STUDIES


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_loads_and_round_trips(path: Path) -> None:
    config = load_config([path])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_reward_of_the_study_of_drift_pays_for_different_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config([ROOT / "configs" / "studies" / "drift" / "base.toml"])
    task = build_task(config.task, seed=0)
    prompt = task[0]
    assert len(task) >= config.steps * config.rollout.prompts_per_step
    score = build_score(config.task, seed=0)
    assert score(prompt, ["", "The the THE sum", " ".join(map(str, range(40)))]) == [0, 2 / 24, 1]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_study_loads_with_all_its_runs(path: Path) -> None:
    runs = load_study(path).trainings
    assert len({run.config.name for run in runs}) == len(runs) > 1


@pytest.mark.parametrize("section", [ArmConfig, StudyConfig])
def test_every_field_of_a_study_has_a_docstring(section: type[Section]) -> None:
    assert all(field.description for field in section.model_fields.values())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_writes_out_its_types(path: Path) -> None:
    """The kind of each union is in the file, so that a reader need not know the defaults."""
    table = tomllib.loads(path.read_text())
    assert "type" in table["task"]
    assert "drafter" not in table or "type" in table["drafter"]["model"]


@pytest.mark.parametrize("block", SECTIONS, ids=section_id)
def test_unknown_field_fails_at_every_level(block: SectionHelp) -> None:
    fields: dict[str, Any] = {**EXAMPLE, "task": {"type": block.kind} if block.path == "task" else EXAMPLE["task"]}
    table = fields
    for name in filter(None, block.path.split(".")):
        table[name] = dict(table.get(name, {}))
        table = table[name]
    table |= {"zzz_unknown": 1} | ({"type": block.kind} if block.kind else {})
    with pytest.raises(ConfigError) as error:
        parse_config(fields)
    [line] = [line for line in error.value.problems if "zzz_unknown" in line]
    assert line.startswith(f"{block.path}.zzz_unknown: unknown field".lstrip("."))


@pytest.mark.parametrize("block", SECTIONS, ids=section_id)
def test_every_field_has_a_docstring(block: SectionHelp) -> None:
    assert block.section.__doc__
    for name, field in block.fields.items():
        assert field.get("description"), f"{block.path}.{name} has no docstring under it"


def test_a_configuration_has_few_fields() -> None:
    """What a user would set. Constants of an estimator are in its module, and vLLM's own arguments in rollout.vllm."""
    fields = {block.section: len(block.fields) for block in SECTIONS}  # one in two places counts once
    assert sum(fields.values()) <= MOST_FIELDS


def test_a_default_section_has_its_own_defaults() -> None:
    """Else writing one field of [drafter.optimizer] would change the others."""
    found = 0
    sections: list[type[Section]] = [RunConfig, *Section.__subclasses__()]
    for section in sections:
        sections += [other for other in section.__subclasses__() if other not in sections]
        for name, field in section.model_fields.items():
            if isinstance(field.default, Section):
                assert field.default == type(field.default)(), f"{section.__name__}.{name}"
                found += 1
    assert found > 10


def test_help_explains_every_field() -> None:
    text = help_text()
    for block in SECTIONS:
        for name, field in block.fields.items():
            if name != "type" or not block.kind:
                assert re.search(rf"^  {name}  \(", text, re.MULTILINE)
                assert " ".join(field["description"].split()) in " ".join(text.split())
    prose = [line for line in text.splitlines() if line.startswith("      ")]
    assert max(map(len, prose)) <= 100


def test_help_shows_types_and_defaults() -> None:
    lines = help_text().splitlines()
    for line in [
        "  steps  (integer > 0, required)",
        "  top_p  (number > 0 and <= 1, default 1.0)",
        "  aux_layers  (list of integers, default none)",
        '  draft_sample_method  (greedy | probabilistic, default "probabilistic")',
        '[task]  type = "dataset"',
    ]:
        assert line in lines
