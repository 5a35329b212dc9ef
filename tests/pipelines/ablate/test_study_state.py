"""What is done with a run on the way to a finished study, and with a folder of another study."""

import json

import pytest

from cotrain.config.errors import ConfigError
from cotrain.config.load import write_config
from cotrain.run.checkpoint import SCHEMA
from cotrain.run.run_dir import RunDir
from pipelines.ablate.command import next_action, restore_state, save_state
from pipelines.ablate.plan import load_study


@pytest.fixture
def run(study_file):
    return next(run for run in load_study(study_file).trainings if run.name == "random, co-trained")


def make_run(run, steps: int = 0, checkpoint: int | None = None) -> None:
    with RunDir(run.config.run_root, run.config.name, resumed=False) as run_dir:
        write_config(run.config, run_dir.config)
        run_dir.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)))
        if checkpoint is not None:
            run_dir.checkpoint(checkpoint).mkdir(parents=True)
            (run_dir.checkpoint(checkpoint) / "COMPLETE").write_text(json.dumps({"schema": SCHEMA, "files": {}}))


@pytest.mark.parametrize(
    ("steps", "checkpoint", "status", "action"),
    [
        (3, None, "finished", "finished"),
        (2, 2, "missing", "resume"),
        (2, 2, "failed", "resume"),
        (2, None, "missing", "start"),
        (3, 3, "missing", "resume"),  # killed after its last step
        (3, 3, "failed", "start"),  # its final check failed
        (2, None, "finished", "start"),  # its files were deleted by hand
    ],
)
def test_a_run_is_resumed_when_it_can_be(run, steps, checkpoint, status, action):
    assert next_action(run) == "start"
    make_run(run, steps, checkpoint)
    run.status = status
    assert next_action(run) == action


def test_a_run_that_is_being_run_is_not_touched(run):
    make_run(run, 2)
    with RunDir(run.config.run_root, run.config.name), pytest.raises(ValueError, match="is being run by another"):
        next_action(run)


def test_an_initialisation_is_made_once(study_file):
    init = load_study(study_file).runs[0]
    assert next_action(init) == "start"
    make_run(init)
    (init.folder / "config.json").unlink()
    assert next_action(init) == "start"
    write_config(init.config, init.folder / "config.json")
    assert next_action(init) == "start"
    (init.folder / "drafter").mkdir()
    assert next_action(init) == "finished"


def start_all(study) -> None:
    for run in study.runs:
        make_run(run)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("temperature = 0.5", "temperature = 0.8", "rollout.temperature: 0.5 -> 0.8 (in generic)"),
        ("steps = 3", "steps = 4", "steps: 3 -> 4 (in generic-frozen-s0)"),
    ],
)
def test_a_folder_of_another_study_is_refused_with_the_field_named(study_file, old, new, changed):
    base = study_file.with_name("base.toml")
    text = base.read_text().replace("[rollout]\n", "[rollout]\ntemperature = 0.5\n")
    base.write_text(text)
    start_all(load_study(study_file))
    restore_state(load_study(study_file))
    base.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as error:
        restore_state(load_study(study_file))
    assert changed in error.value.problems and len(error.value.problems) == 2


def test_a_changed_arm_and_initialisation_are_named(study_file):
    start_all(load_study(study_file))
    text = study_file.read_text()
    study_file.write_text(
        text.replace('"drafter.train" = true', '"policy.train" = false').replace('"steps" = 5', '"steps" = 6')
    )
    with pytest.raises(ConfigError) as error:
        restore_state(load_study(study_file))
    assert error.value.problems[:2] == [
        "steps: 5 -> 6 (in generic)", "policy.train: True -> False (in random-co-trained-s0)"
    ]  # fmt: skip


def test_arms_and_seeds_may_be_added(study_file):
    study = load_study(study_file, ["seeds=[0]"])
    start_all(study)
    study.trainings[0].status = "finished"
    save_state(study)
    study_file.write_text(study_file.read_text() + '\n[[arms]]\nname = "k 1"\nrollout.num_speculative_tokens = 1\n')
    study = load_study(study_file)
    restore_state(study)
    statuses = {run.title: run.status for run in study.trainings}
    assert statuses.pop("generic, frozen, seed 0") == "finished"
    assert len(statuses) == 7 and set(statuses.values()) == {"missing"}
