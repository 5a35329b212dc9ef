"""Study files: what they expand to, and how wrong ones are refused."""

import pytest

from cotrain.config.errors import ConfigError
from pipelines.ablate.plan import load_study


def problems(study_file, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_study(study_file, overrides)
    return error.value.problems


def arms(*fields: str) -> str:
    return f"arms=[{', '.join('{' + text + '}' for text in fields)}]"


def test_arms_differ_from_the_shared_configuration_only_in_what_they_set(study_file):
    study = load_study(
        study_file,
        [
            arms(
                "name='x', init='generic', 'drafter.train'=false, policy={train=false}, rollout.num_speculative_tokens=2"
            )
        ],
    )
    config = study.trainings[1].config
    expected = study.shared.model_dump(mode="json")
    expected |= {"name": "x-s1", "seed": 1, "run_root": str(study.folder / "runs")}
    expected["policy"]["train"] = False
    expected["rollout"]["num_speculative_tokens"] = 2
    expected["drafter"] |= {"train": False, "init": str(study.folder / "inits/generic/drafter")}
    assert config.model_dump(mode="json") == expected


def test_without_speculation_there_is_no_drafter(study_file):
    arm = load_study(study_file, [arms("name='x', drafter='none'")]).runs[0]
    assert arm.config.drafter is None and arm.config.policy == load_study(study_file).shared.policy


def test_an_arm_drafts_from_history_alone(study_file):
    usual = "name='usual', drafter='none', 'rollout.history'={}"
    other = "name='other', drafter='none', 'rollout.history'={max_bytes=100000000}"
    study = load_study(study_file, [arms(usual, other)])
    assert [getattr(arm.config.rollout.history, "max_bytes", None) for arm in study.runs[:2]] == [2**28, 10**8]
    assert [arm.config.drafter for arm in study.runs[:2]] == [None, None]
    with pytest.raises(ValueError, match=r"rollout\.history: an engine drafts from a history or from a drafter"):
        load_study(study_file, [arms("name='both', 'rollout.history'={}")])


def test_an_initialisation_overrides_the_shared_configuration(study_file):
    init = load_study(study_file).runs[0].config
    assert init.steps == 5 and init.task.path == str(study_file.with_name("prompts.jsonl"))
    assert (init.name, init.run_root.name) == ("generic", "inits")


def test_paths_of_the_shared_configuration_are_relative_to_the_study_file_too(study_file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def paths(task: str) -> list[tuple[str, str]]:
        lines = ["[task]", "type = 'dataset'", f"path = '{task}'", "[policy]", "model = 'model'"]
        (study_file.parent / "data.toml").write_text("\n".join(lines))
        study = load_study(study_file, ["config=['base.toml', 'data.toml']"])
        return [(run.config.task.path, run.config.policy.model) for run in study.trainings]

    (elsewhere / "rows.jsonl").touch()
    assert set(paths("rows.jsonl")) == {("rows.jsonl", "model")}, (
        "relative to the working folder, where it is there alone"
    )
    (study_file.parent / "rows.jsonl").touch()
    (study_file.parent / "model").mkdir()
    beside = (str(study_file.parent / "rows.jsonl"), str(study_file.parent / "model"))
    assert set(paths("rows.jsonl")) == {beside}
    assert {task for task, _ in paths("openai/gsm8k")} == {"openai/gsm8k"}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (arms("name='x', policy.lr=1e-5"), "arm 'x': policy.lr: unknown field; did you mean policy.optimizer.learning_rate?"),
        (arms("name='x', policy='frozen'"), "arm 'x': policy: must be a valid table"),
        (arms("name='x', steps=4"), "arm 'x': steps: must not differ between runs of a study; set it in the shared config"),
        (arms("name='x', seed=4"), "arm 'x': seed: must not differ between runs of a study; set it in the shared config, or by name and seeds"),
        (arms("name='x', 'tracking.uri'='a'"), "arm 'x': tracking.uri: must not differ between runs"),
        (arms("name='x', task.seed=1"), "arm 'x': task.seed: must not differ between runs"),
        (arms("name='x', 'rollout.max_new_tokens'=1"), "arm 'x': rollout.max_new_tokens: must not differ between runs"),
        (arms("name='x', drafter.trian=true"), "did you mean drafter.train?"),
        (arms("name='x', drafter='none', 'drafter.train'=false"), "arm 'x': drafter.model: missing"),
        (arms("name='x', drafter='none', init='generic'"), "arm 'x': drafter.model: missing"),
        (arms("name='x', init='genric'"), "arm 'x': init: 'genric' is not in [inits]; a drafter of elsewhere is named by drafter.init"),
        (arms("name='x', 'rollout.num_speculative_tokens'=4"), "arm 'x': rollout.num_speculative_tokens: 4 is above drafter.model.trained_depth = 3"),
        (arms("name='x', drafter.objective={type='lk_hybrid'}"), "arm 'x': drafter.objective: unknown field; drafter has"),
        (arms("name='x y'", "name='x-y', rollout.num_speculative_tokens=1"), "arm 'x-y': would share run folders x-y-s* with another arm; rename one"),
        (arms("init='generic'"), "arms.name: missing: Name in tables"),
        ("arms=[]", "arms: Tuple should have at least 1 item"),
        ("seeds=[1,1]", "seeds: [1, 1] holds a seed twice"),
        ("seed=[1]", "seed: unknown field; did you mean seeds?"),
        ("config=['bas.toml']", "bas.toml: no such file; did you mean"),
        ("name='a b'", "name: String should match pattern"),
        ("inits.generic={'policy.model'='other'}", "inits.generic: policy.model: must not differ between runs"),
        ("inits.generic={'steps'=0}", "inits.generic: steps: must be greater than 0"),
    ],
)  # fmt: skip
def test_a_wrong_study_is_refused_with_the_field_named(study_file, override, problem):
    assert any(problem in line for line in problems(study_file, override)), problems(study_file, override)


def test_all_problems_are_found_in_one_pass(study_file):
    found = problems(study_file, arms("name='x', steps=1", "name='y', init='no'"), "inits.b={name='c'}")
    assert [line.partition(": ")[0] for line in found] == ["inits.b", "arm 'x'", "arm 'y'"]


def test_an_arm_may_have_another_drafter_and_then_needs_one_of_its_kind(study_file):
    mtp = "name='mtp', 'drafter.model.trained_depth'=2, 'rollout.num_speculative_tokens'=2, drafter.model={type='mtp'}"
    arm = load_study(study_file, [arms(mtp)]).runs[0]
    assert arm.config.drafter.model.model_dump() == {"type": "mtp", "trained_depth": 2}
    arm = load_study(study_file, [arms("name='x', drafter.model={draft_vocab_size=64}")]).runs[0]
    assert arm.config.drafter.model.type == "eagle3" and arm.config.drafter.model.trained_depth == 3
    [line] = problems(study_file, arms("name='mtp', drafter.model={type='mtp'}, init='generic'"))
    assert line == "arm 'mtp': init: inits.generic makes a drafter with another drafter.model; give both the same"
    fitting = "inits.other={'drafter.model.type'='mtp'}"
    init, *runs = load_study(study_file, [arms("name='mtp', drafter.model={type='mtp'}, init='other'"), fitting]).runs
    assert init.name == "other" and {run.needs for run in runs} == {init}
    assert init.config.drafter.model == runs[0].config.drafter.model


def test_the_type_of_a_section_may_come_after_its_fields(study_file):
    later = "inits.later={'task.path'='prompts.jsonl', 'task.type'='dataset'}"
    assert (
        load_study(study_file, [later, arms("name='x', init='later'")])
        .runs[0]
        .config.task.path.endswith("prompts.jsonl")
    )
