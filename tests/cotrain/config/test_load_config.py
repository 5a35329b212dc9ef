"""Files, overrides and messages: what a user writes and what a user reads back."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from cotrain.config.load import ConfigError, load_config, merge, parse_config, read_config, to_toml, write_config
from cotrain.config.schema import RunConfig
from cotrain.run.run_dir import RunDir

FULL = [
    "name=first",
    "steps=4",
    "policy.model=bundled:smollm2-135m-instruct",
    "task.type=reasoning_gym",
    "task.name=chain_sum",
    "drafter.model.type=eagle3",
]


def problems(*overrides: str) -> list[str]:
    """What is said about FULL with some overrides."""
    with pytest.raises(ConfigError) as error:
        load_config([], [*FULL, *overrides])
    return error.value.problems


def test_later_files_win_over_earlier_ones_and_overrides_over_both(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[rollout]\ntop_k = 5\ntemperature = 0.5\nprompts_per_step = 4\n")
    second.write_text("[rollout]\ntemperature = 0.6\nprompts_per_step = 2\n")
    config = load_config([first, second], [*FULL, "rollout.prompts_per_step=16", "policy.old_log_probs=recomputed"])
    assert (config.rollout.top_k, config.rollout.temperature, config.rollout.prompts_per_step) == (5, 0.6, 16)
    assert config.rollout.samples_per_prompt == 8  # the default


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("policy.optimizer.learning_rate=1e-6", 1e-6),
        ("policy.gradient_checkpointing=true", True),
        ("drafter.model.aux_layers=[1, 4, 7]", (1, 4, 7)),
        ("rollout.draft_sample_method=greedy", "greedy"),
        ('rollout.draft_sample_method="greedy"', "greedy"),
        ('name="7"', "7"),
        ("drafter.init=models:/d@serving", "models:/d@serving"),
        ("rollout.vllm.compilation_config.mode=0", 0),
        ("tracking.uri=http://host:5000/?a=b", "http://host:5000/?a=b"),
        ("drafter=none", None),
    ],
)
def test_override_values_are_toml_and_bare_words_are_strings(text: str, value: object) -> None:
    found = load_config([], [*FULL, text])
    for name in text.partition("=")[0].split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value


def test_another_type_replaces_the_whole_section() -> None:
    earlier = {"task": {"type": "reasoning_gym", "name": "chain_sum"}, "steps": 3}
    later = {"task": {"type": "dataset", "path": "a.jsonl"}}
    assert merge(earlier, later) == {"task": {"type": "dataset", "path": "a.jsonl"}, "steps": 3}
    assert merge(earlier, {"task": {"size": 5}})["task"] == {"type": "reasoning_gym", "name": "chain_sum", "size": 5}


def test_all_errors_come_in_one_pass_with_their_paths() -> None:
    found = problems(
        "steps=0",
        "policy.optimizer.learning_rat=1",
        "policy.clip_low=2",
        "rollout.temperature=hot",
        "drafter.buffer.max_bytez=1",
        "task.nmae=x",
        "cluster=3",
        "trackin.uri=x",
    )
    assert sorted(line.partition(":")[0] for line in found) == [
        "cluster",
        "drafter.buffer.max_bytez",
        "policy.clip_low",
        "policy.optimizer.learning_rat",
        "rollout.temperature",
        "steps",
        "task.nmae",
        "trackin",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.clip_lo=1", "policy.clip_lo: unknown field; did you mean policy.clip_low?"),
        ("policy.learning_rate=1", "policy.learning_rate: unknown field; did you mean policy.optimizer.learning_rate?"),
        ("drafter.lr=1", "drafter.lr: unknown field; did you mean drafter.optimizer.learning_rate?"),
        ("zzz=1", "zzz: unknown field; the top level has name, steps, seed,"),
        ("task.instructon=x", "task.instructon: unknown field; did you mean task.instruction?"),
        (
            "task.type=reasoning_gim",
            "task.type: 'reasoning_gim' is not one of reasoning_gym, dataset, environment; did you mean",
        ),
        (
            "drafter.model.type=eagle",
            "drafter.model.type: 'eagle' is not one of eagle3, dflash, dspark, mtp, draft_model; did you mean eagle3?",
        ),
        ("policy.advantage=group_men", "got 'group_men'; did you mean group_mean?"),
        ("rollout.temperature=hot", "rollout.temperature: must be a valid number, unable to parse"),
        ("policy.optimizer.learning_rate=inf", "policy.optimizer.learning_rate: must be a finite number, got inf"),
        ("name=7", "name: must be a valid string, got 7; write it in quotes (on the command line: 'name=\"7\"')"),
        ("drafter.model.aux_layers=[]", "drafter.model.aux_layers: Tuple should have at least 1 item"),
        ("rollout.stop=5", "rollout.stop: must be a valid list, got 5"),
        ("rollout.vllm=5", "rollout.vllm: must be a valid table, got 5"),
        ("task.name=none", "task.name: must be a valid string, got None"),
        ("steps.x=5", "steps: must be a valid integer, got {'x': 5}"),
    ],
)
def test_messages_name_the_field_and_the_fix(override: str, message: str) -> None:
    [line] = problems(override)
    assert message in line


def test_missing_fields_are_explained() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], ["policy.dtype=float32", "drafter.train=false", "task.name=chain_sum"])
    lines = "\n".join(error.value.problems)
    assert "policy.model: missing: Local folder, hub id, or bundled:" in lines
    assert "task.type: missing; one of reasoning_gym, dataset, environment" in lines
    assert "drafter.model: missing: Kind and shape of the drafter." in lines
    assert str(error.value).startswith("5 problems in the configuration:\n  name: missing")


def test_unreadable_files_and_overrides_are_listed_together(tmp_path: Path) -> None:
    (tmp_path / "smoke.toml").write_text("steps = \n")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    files = [tmp_path / "smoke.toml", tmp_path / "smok.toml", tmp_path / "latin.toml"]
    with pytest.raises(ConfigError) as error:
        load_config(files, ["--steps=3", "a b=3"])
    broken, missing, latin, *overrides = error.value.problems
    assert "smoke.toml: not valid TOML" in broken and "line 1" in broken
    assert missing.endswith(f"no such file; did you mean {tmp_path / 'smoke.toml'}?")
    assert "not valid TOML" in latin
    assert all("not an override" in line for line in overrides) and len(overrides) == 2


def test_config_json_reloads_to_an_equal_object(tmp_path: Path) -> None:
    config = load_config(
        [],
        [*FULL, "rollout.stop=['a']", "drafter.model.aux_layers=[1, 4, 7]", "rollout.vllm.cudagraph_capture_sizes=[1]"],
    )
    write_config(config, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json") == config


def test_damaged_config_json_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"name": ')
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(path)
    path.write_text('{"name": "x", "setps": 3}')
    with pytest.raises(ConfigError, match="setps: unknown field; did you mean steps"):
        read_config(path)


def test_the_printed_configuration_is_toml_that_loads_to_an_equal_object() -> None:
    tables = '[{name = "a", "b c" = {}}, {d = [1, {e = 2}]}]'
    tricky = [
        f'task.parameters={{"a b" = "q\\"uote", "c" = {tables}}}',
        'rollout.stop=["\\n", "x", "\U0001f600", "\\u007f"]',
    ]
    config = load_config([], [*FULL, *tricky])
    text = to_toml(config)
    assert parse_config(tomllib.loads(text)) == config
    assert "# drafter.init is not set" in text


OF_RUNS = {*Path("configs").rglob("*.toml")} - {
    *Path("configs").rglob("study.toml"),
    *Path("configs/simulate").iterdir(),
}


@pytest.mark.parametrize("file", sorted(OF_RUNS))
def test_what_is_committed_survives_printing(file: Path) -> None:
    """As a study writes it for its arms."""
    config = load_config([file], [])
    assert parse_config(tomllib.loads(to_toml(config))) == config


def test_resume_starts_from_the_saved_configuration(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    saved = load_config([], [*FULL, f"run_root={root}", "rollout.temperature=0.7"])
    (root / "first").mkdir(parents=True)
    write_config(saved, root / "first" / "config.json")
    (root / "first" / "run.lock").touch()

    assert load_config([], [f"run_root={root}"], resume="first") == saved
    longer = load_config([], [f"run_root={root}", "steps=9", "name=other"], resume="first")
    assert (longer.name, longer.steps, longer.rollout.temperature) == ("first", 9, 0.7)
    with pytest.raises(
        ConfigError, match=r"--resume firts: no such run in .* \(it holds first\); did you mean first\?"
    ):
        load_config([], [f"run_root={root}"], resume="firts")


@pytest.mark.parametrize("root", ["runs", "other runs"])
def test_the_arguments_that_messages_give_continue_the_run(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = load_config([], [*FULL, f"run_root={root}"])
    with RunDir(saved.run_root, "first", resumed=False) as run:
        write_config(saved, run.config)
        option, name, *overrides = shlex.split(run.resume)
    assert option == "--resume" and len(overrides) == (root != "runs")
    assert load_config([], overrides, resume=name) == saved


def test_a_partial_section_keeps_the_other_defaults() -> None:
    """A default that is a section equals that section's own defaults: writing one field never changes another."""
    config = load_config([], [*FULL, "drafter.optimizer.schedule=cosine"])
    assert config.drafter is not None and config.drafter.optimizer.learning_rate == 1e-3


def test_json_keeps_what_toml_cannot_say() -> None:
    config = load_config([], FULL)
    assert json.loads(config.model_dump_json())["drafter"]["init"] is None
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
