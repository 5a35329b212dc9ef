"""Bad input that shows only beside a model, a dataset or a machine is refused before any model loads."""

import json
import re
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cotrain.config.load import load_config
from cotrain.config.schema import RunConfig
from cotrain.models.tiny import byte_tokenizer
from pipelines import preflight
from pipelines.preflight import find_problems

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """What is read of a model before it loads: config, tokenizer, template, and the header of the weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    byte_tokenizer().save_pretrained(folder)
    save_file({"model.embed_tokens.weight": np.zeros((64, 32), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def build(tmp_path: Path, model: Path):
    """A configuration that passes, with some overrides."""

    def config(*overrides: str) -> RunConfig:
        lengths = ["rollout.max_prompt_tokens=128", "rollout.max_new_tokens=124"]  # and 4 spare ones for drafts
        drafter = ["drafter.model.type=eagle3", "drafter.model.draft_vocab_size=32"]
        task = ["task.type=reasoning_gym", "task.name=chain_sum", "task.size=8"]
        names = ["name=first", "steps=2", f"run_root={tmp_path / 'runs'}", f"policy.model={model}"]
        return load_config([], [*names, *lengths, *drafter, *task, *overrides])

    return config


def quick_problems(config: RunConfig) -> list[str]:
    """What a dry run refuses."""
    return find_problems(config, quick=True)


def problems(config: RunConfig) -> list[str]:
    """What a run that starts refuses; there must be something."""
    found = find_problems(config)
    assert found
    return found


def test_a_run_that_can_start_passes(build) -> None:
    assert find_problems(build()) == []
    assert find_problems(build("drafter=none")) == []
    assert find_problems(build("drafter.model.aux_layers=[1, 2, 7]", "rollout.vllm.max_num_seqs=4")) == []


def test_all_problems_come_together(build, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    found = problems(build("drafter.model.draft_vocab_size=65", "rollout.max_new_tokens=125", "task.name=chain_sun"))
    assert len(found) == 4
    assert found[0].startswith("name: run 'first' is already in")
    assert "chain_sun" in found[1]
    assert found[2].startswith(
        "rollout.max_new_tokens: max_prompt_tokens + max_new_tokens = 253, with 4 spare positions"
    )
    assert found[3].startswith("drafter.model.draft_vocab_size: 65 is above the target's vocabulary of 64 tokens")


def test_used_name_is_refused_unless_resumed(build, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    [line] = problems(build())
    assert f"continue it with --resume first run_root={tmp_path}/runs, or choose another name=..." in line
    assert find_problems(build(), resume=True) == []


def test_missing_model_is_refused(build, tmp_path: Path) -> None:
    [line] = problems(build(f"policy.model={tmp_path}/nothing"))
    assert line.startswith("policy.model: there is no local folder")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    (tmp_path / "model" / "chat_template.jinja").unlink()
    [line] = problems(build())
    assert line.startswith("policy.model:") and "the tokenizer has no chat template" in line
    (tmp_path / "model" / "model.safetensors").unlink()
    [line] = problems(build())
    assert line.startswith("policy.model:") and "no model.safetensors" in line


def test_dataset_without_the_column_lists_the_columns(build, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"ask": "1 + 1", "answer": "2"}\n')
    [line] = problems(build("task=none", "task.type=dataset", f"task.path={path}"))
    assert line.startswith("task.prompt_column: no column") and "name one of these: ask, answer" in line
    [line] = problems(build("task=none", "task.type=dataset", f"task.path={tmp_path}/none.jsonl"))
    assert line.startswith("task.path: no file")


def test_problems_of_held_out_prompts_name_their_own_fields(build, tmp_path: Path) -> None:
    held_out = ["validation.task.type=reasoning_gym", "validation.task.name=chain_sum", "validation.task.size=8"]
    assert find_problems(build(*held_out, "validation.num_prompts=8")) == []
    [line] = problems(build(*held_out, "validation.num_prompts=9"))
    assert line.startswith("validation.num_prompts: 9 is more than the 8 prompts of the task; lower it, or raise valid")
    [line] = problems(build(*held_out, "validation.num_prompts=8", "validation.task.num_scorers=2"))
    assert line.startswith("validation.task.num_scorers: a single process")
    [line] = problems(build(*held_out, "validation.num_prompts=8", "validation.samples_per_prompt=2"))
    assert line.startswith("validation.samples_per_prompt: all are the same at validation.temperature = 0")
    data = ["validation.task.type=dataset", f"validation.task.path={tmp_path}/none.jsonl", "validation.task.reward=no"]
    lines = problems(build(*data))
    assert [line.partition(":")[0] for line in lines] == ["validation.task.path", "validation.task.reward"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A dataset of eight good rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": i + 1}) + "\n" for i in range(8)))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task.path={folder}/none.jsonl"], "task.path: no file or folder"),
        (["task.prompt_column=text"], "task.prompt_column: no column text; name one of these: prompt, answer"),
        (["task.reward=no_such_module:score"], "task.reward: no_such_module:score is neither"),
        (["task.path=some/dataset", "task.reward=no_such_module:score"], "task.reward: no_such_module:score is neither"),
        (["rollout.max_prompt_tokens=5"], "task.path: 8 of the 8 rows of {folder}/rows.jsonl cannot be used:"),
        (["task.split=train[:2]"], "rollout.prompts_per_step: 8 is more than the 2 prompts of the task; lower it, or add rows"),
        (["policy.model={folder}/nothing"], "policy.model: there is no local folder"),
        (["policy.model=tiny:nothing"], "policy.model: unknown model 'tiny:nothing'"),
        (["policy.model=runs/my/model"], "policy.model: there is no local folder"),
        (["run_root={folder}/rows.jsonl"], "run_root: {folder}/rows.jsonl is no folder that can be written"),
        (["rollout.max_new_tokens=125"], "rollout.max_new_tokens: max_prompt_tokens + max_new_tokens = 253"),
        (["drafter.model.draft_vocab_size=65"], "drafter.model.draft_vocab_size: 65 is above"),
    ],
    ids=lambda value: " ".join(value).replace("{folder}/", "") if isinstance(value, list) else "",
)  # fmt: skip
def test_a_dry_run_finds_what_needs_no_model(
    build, tmp_path: Path, rows: Path, changes: list[str], message: str
) -> None:
    config = build("task=none", "task.type=dataset", f"task.path={rows}", "task.reward=numeric",
                   *(change.format(folder=tmp_path) for change in changes))  # fmt: skip
    [line] = quick_problems(config)
    assert line.startswith(message.format(folder=tmp_path))


def test_a_dry_run_checks_every_reward_and_its_columns(
    build, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "levels.py").write_text("def score(prompt, response, answer, level): return level\n")
    monkeypatch.chdir(tmp_path)
    rewards = 'task.reward=["nowhere:score", "numeric", "levels:score", "exakt"]'
    unknown, other, column = quick_problems(build("task=none", "task.type=dataset", f"task.path={rows}", rewards))
    assert unknown.startswith("task.reward: nowhere:score is neither") and other.startswith("task.reward: exakt is")
    missing = "missing a required argument: 'level'; the columns are prompt, answer"
    assert column == f"task.reward: levels:score: {missing}"


def test_a_dry_run_fetches_nothing(build, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "resolve_model", lambda name: pytest.fail(f"fetched {name}"))
    monkeypatch.setattr("cotrain.tasks.datasets.load_rows", lambda source: pytest.fail(f"fetched {source.path}"))
    for model in ("tiny:llama", "Qwen/Qwen3-0.6B", "gpt2"):
        dataset = ("task=none", "task.type=dataset", "task.path=openai/gsm8k/main")
        assert quick_problems(build(f"policy.model={model}", *dataset)) == []


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[2, 4, 8]", "drafter.model.aux_layers: aux layers [2, 4, 8] are not ascending ids between 1 and 7"),
        ("[1, 2, 7]", None),
    ],
)
def test_aux_layers_lie_inside_the_target(build, layers: str, message: str | None) -> None:
    config = build(f"drafter.model.aux_layers={layers}")
    if message is None:
        assert find_problems(config) == []
    else:
        assert problems(config)[0].startswith(message)


def test_a_drafter_that_the_policys_class_in_vllm_cannot_serve_is_refused(build, tmp_path: Path) -> None:
    write_model(tmp_path / "glm", architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe")
    [line] = problems(build(f"policy.model={tmp_path / 'glm'}"))
    assert line == (
        "drafter.model.type: vLLM's class for Glm4MoeForCausalLM gives no hidden states to a drafter; "
        f"`cotrain models {tmp_path / 'glm'}` says what can draft"
    )
    assert find_problems(build(f"policy.model={tmp_path / 'glm'}", "drafter=none")) == []


def test_a_policy_that_vllms_cpu_build_cannot_serve_is_refused(build, tmp_path: Path) -> None:
    write_model(tmp_path / "minimax", architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2")
    [line] = problems(build(f"policy.model={tmp_path / 'minimax'}"))
    assert line.startswith("policy.model: model_type minimax_m2 needs a GPU: the router of experts")


def test_default_aux_layers_that_collide_are_refused(build, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", num_hidden_layers=4)
    [line] = problems(build(f"policy.model={small}"))
    assert line.startswith("drafter.model.aux_layers: the default")


ITS_SETTINGS = (
    "drafter.model.aux_layers=[1, 3, 5]",
    "drafter.model.trained_depth=2",
    "rollout.num_speculative_tokens=2",
)


@pytest.fixture
def drafter(build, tmp_path: Path, model: Path) -> Path:
    """A checkpoint folder for the target."""
    import torch

    from drafters.base import TargetSpec
    from drafters.build import build_drafter

    folder = tmp_path / "drafter"
    config = build(*ITS_SETTINGS)
    build_drafter(config.drafter.model, TargetSpec.from_pretrained(model), seed=0).save(folder, torch.float32)
    return folder


def test_drafter_of_this_target_passes(build, drafter: Path) -> None:
    assert find_problems(build(f"drafter.init={drafter}", *ITS_SETTINGS)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "drafter.init: .* made for another target: its hidden_size is 32, this one's is 64"),
        ({"vocab_size": 96}, "drafter.init: .* made for another target: its vocab_size is 64, this one's is 96"),
        ({"num_hidden_layers": 5}, r"drafter.init: .* aux layers \[1, 3, 5\] are not ascending ids between 1 and 4"),
    ],
    ids=["hidden size", "vocabulary", "layers"],
)
def test_drafter_of_another_target_is_refused(build, drafter: Path, tmp_path: Path, change: dict, message: str) -> None:
    other = write_model(tmp_path / "other", **change)
    config = build(f"policy.model={other}", f"drafter.init={drafter}", *ITS_SETTINGS)
    assert re.search(message, "\n".join(problems(config)))


def test_a_draft_model_of_another_vocabulary_is_refused(build, tmp_path: Path) -> None:
    import torch

    from drafters.base import TargetSpec
    from drafters.build import build_drafter

    other, folder = write_model(tmp_path / "other", vocab_size=96), tmp_path / "drafter"
    settings = 'drafter={model={type="draft_model"}}'
    config = build(settings, f"drafter.init={folder}")
    build_drafter(config.drafter.model, TargetSpec.from_pretrained(other), seed=0).save(folder, torch.float32)
    [line] = problems(config)
    assert line.startswith("drafter.init: ") and "its vocab_size is 96, this one's is 64" in line
    assert find_problems(build(settings)) == []
    [line] = problems(build(settings, f"policy.model={write_model(tmp_path / 'flat', num_hidden_layers=1)}"))
    assert line.startswith("drafter.model.num_layers: 2 layers cannot be cut from the target's 1")


def test_drafter_of_another_shape_than_configured_is_refused(build, drafter: Path) -> None:
    [line] = problems(build(f"drafter.init={drafter}", *ITS_SETTINGS, "drafter.model.aux_layers=[1, 3, 6]"))
    assert "drafter.model.aux_layers is (1, 3, 6), the checkpoint has (1, 3, 5)" in line


def test_a_drafter_trained_for_fewer_positions_than_are_served_is_refused(build, drafter: Path) -> None:
    settings = (*ITS_SETTINGS, "rollout.num_speculative_tokens=3", "drafter.model.trained_depth=3")
    [line] = problems(build(f"drafter.init={drafter}", *settings))
    assert "drafter.model.trained_depth is 3, the checkpoint has 2" in line


def test_truncated_drafter_is_refused(build, drafter: Path) -> None:
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    [line] = problems(build(f"drafter.init={drafter}", "rollout.num_speculative_tokens=2"))
    assert line.startswith("drafter.init:") and "truncated or corrupt" in line


def test_unreachable_mlflow_is_refused(build) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        port = listener.getsockname()[1]
        [mlflow] = quick_problems(build(f"tracking.uri=http://127.0.0.1:{port}"))
    assert mlflow.startswith(f"tracking.uri: no answer from http://127.0.0.1:{port}")


def test_misspelt_vllm_argument_is_refused(build) -> None:
    [line] = quick_problems(build("rollout.vllm.max_num_seq=4", "drafter=none"))
    assert line == "rollout.vllm.max_num_seq: vLLM has no such engine argument; did you mean rollout.vllm.max_num_seqs?"


def test_an_environment_that_changes_what_is_sampled_is_refused(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert quick_problems(build()) == []
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    [line] = quick_problems(build())
    assert line.startswith("VLLM_CPU_INT4_W4A8: '1' quantises the target") and line.endswith("unset it")
    assert quick_problems(build("drafter=none")) == []


def test_a_model_runner_that_cannot_run_here_is_refused(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert quick_problems(build()) == []
    [line] = quick_problems(build("drafter=none", "rollout.history.max_bytes=1000000"))
    assert line.startswith("VLLM_USE_V2_MODEL_RUNNER: '1': only V1 drafts from a history; unset it")
    monkeypatch.delenv("TRITON_INTERPRET")
    [line] = quick_problems(build("drafter=none"))
    assert line.startswith("VLLM_USE_V2_MODEL_RUNNER: '1': vLLM's CPU build has no Triton")


def test_gpu_that_is_not_there_is_refused(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "machine", lambda: {"gpus": []})
    monkeypatch.setattr(preflight, "engine_device", lambda: "cuda")
    [line] = quick_problems(build())
    assert line.startswith("vLLM is installed for GPUs, but there is none; run `make setup` again")


def test_too_little_disk_and_shared_memory_are_refused(build, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 4000))
    disk, shared = problems(build())
    assert disk.startswith("run_root:") and "3 checkpoints of" in disk and "lower checkpoint.keep_last" in disk
    assert shared.startswith("policy.model: policy updates take") and "--shm-size" in shared


def test_shared_memory_must_hold_two_policies(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has 64 x 32 parameters, and an update is in bfloat16."""
    usage = namedtuple("usage", "total used free")

    def shared_memory_of(free: int) -> None:
        free_of = {Path("/dev/shm"): free}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free_of.get(Path(path), 10**9)))

    shared_memory_of(2 * 64 * 32 * 2)
    assert find_problems(build()) == []
    shared_memory_of(2 * 64 * 32 * 2 - 1)
    [line] = problems(build())
    assert line.startswith("policy.model: policy updates take")


def test_run_root_that_cannot_be_written_is_refused(build, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line, *_ = problems(build("run_root=/proc/runs"))
    assert line.startswith("run_root: /proc is no folder that can be written")
    [line] = problems(build(f"run_root={tmp_path / 'file'}"))
    assert line.startswith(f"run_root: {tmp_path / 'file'} is no folder that can be written")
