"""What is done with a run on the way to a finished study, and with a folder of another study."""

import json

import pytest

from cotrain.config.errors import ConfigError
from cotrain.config.load import write_config
from cotrain.run.checkpoint import SCHEMA
from cotrain.run.run_dir import RunDir
from pipelines.ablate.plan import load_study
from pipelines.ablate.state import check_same_settings, clear, next_action, next_init_action, study_record


@pytest.fixture
def config(study_file):
    study = load_study(study_file)
    return study.run_config(study.arms[1], study.arms[1].runs[0])


def make_run(config, steps: int, checkpoint: int | None) -> None:
    with RunDir.create(config.run_root, config.name) as run_dir:
        run_dir.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)))
        if checkpoint is not None:
            run_dir.checkpoint(checkpoint).mkdir(parents=True)
            (run_dir.checkpoint(checkpoint) / "COMPLETE").write_text(json.dumps({"schema": SCHEMA, "files": {}}))


def test_a_run_that_never_started_starts(config):
    assert next_action(config, "missing") == "start"


@pytest.mark.parametrize(
    ("steps", "checkpoint", "status", "action"),
    [
        (3, None, "finished", "finished"),
        (2, 2, "missing", "resume"),
        (2, 2, "failed", "resume"),
        (2, None, "missing", "start over"),
        (3, 3, "missing", "resume"),  # killed after its last step
        (3, 3, "failed", "start over"),  # its final check failed
        (2, None, "finished", "start over"),  # its files were deleted by hand
    ],
)
def test_a_run_is_resumed_when_it_can_be(config, steps, checkpoint, status, action):
    make_run(config, steps, checkpoint)
    assert next_action(config, status) == action


def test_a_run_that_is_being_run_is_not_touched(config):
    make_run(config, 2, None)
    with RunDir(config.run_root, config.name):
        for act in (lambda: next_action(config, "missing"), lambda: clear(config)):
            with pytest.raises(ValueError, match="is being run by another process"):
                act()
    clear(config)
    assert next_action(config, "missing") == "start" and list(config.run_root.iterdir()) == []


def test_an_initialisation_is_made_once(study_file):
    config = load_study(study_file).inits["generic"]
    folder = config.run_root / config.name
    assert next_init_action(config) == "start"
    folder.mkdir(parents=True)
    assert next_init_action(config) == "start over"
    (folder / "config.json").write_text("{}")
    assert next_init_action(config) == "resume"
    (folder / "init.json").write_text("{}")
    assert next_init_action(config) == "finished"


def start_all(study):
    """Every run and initialisation saves its configuration."""
    configs = [*study.inits.values(), *(study.run_config(arm, run) for arm in study.arms for run in arm.runs)]
    for config in configs:
        (config.run_root / config.name).mkdir(parents=True)
        write_config(config, config.run_root / config.name / "config.json")


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("temperature = 0.5", "temperature = 0.8", "rollout.temperature: 0.5 -> 0.8 (in generic)"),
        ("steps = 3", "steps = 4", "steps: 3 -> 4 (in generic)"),
    ],
)
def test_a_folder_of_another_study_is_refused_with_the_field_named(study_file, old, new, changed):
    base = study_file.with_name("base.toml")
    text = base.read_text().replace("[rollout]\n", "[rollout]\ntemperature = 0.5\n")
    base.write_text(text)
    start_all(load_study(study_file))
    check_same_settings(load_study(study_file))
    base.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as error:
        check_same_settings(load_study(study_file))
    assert changed in error.value.problems and len(error.value.problems) == 2


def test_a_changed_arm_and_initialisation_are_named(study_file):
    start_all(load_study(study_file))
    text = study_file.read_text()
    study_file.write_text(text.replace("online = true", 'online = true\npolicy = "frozen"').replace("500", "600"))
    with pytest.raises(ConfigError) as error:
        check_same_settings(load_study(study_file))
    assert error.value.problems[:2] == [
        "init.tokens: 500 -> 600 (in generic)", "policy.train: True -> False (in random-co-trained-s0)"
    ]  # fmt: skip


def test_arms_and_seeds_may_be_added(study_file):
    study = load_study(study_file, ["seeds=[0]"])
    start_all(study)
    record = study_record(study)
    record.arms[0].runs[0].status = "finished"
    record.write(study.folder)
    study_file.write_text(study_file.read_text() + '\n[[arms]]\nname = "k 1"\nnum_speculative_tokens = 1\n')
    study = load_study(study_file)
    check_same_settings(study)
    arms = study_record(study).arms
    assert [run.status for run in arms[0].runs] == ["finished", "missing"]
    assert [run.status for run in arms[3].runs] == ["missing", "missing"]
