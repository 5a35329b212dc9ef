"""The files of a model or drafter folder, read without torch: config.json and the headers of safetensors files."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read config.json of a model folder. Raises ValueError when there is none or it is not a JSON object."""
    return read_object(Path(folder) / CONFIG, "a Hugging Face model")


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with those of its language model, which wrappers of one keep under text_config."""
    return {**config, **(config.get("text_config") or {})}


def text_tensors(folder: str | Path, names: Iterable[str]) -> list[str]:
    """Return those names of a checkpoint's tensors that belong to its language model: all of them, if it is no wrapper of one."""
    is_wrapper = "text_config" in read_config(folder)
    return [name for name in names if not is_wrapper or {"language_model", "lm_head"} & {*name.split(".")}]


def read_object(path: Path, what: str = "a run or a study") -> dict[str, Any]:
    """Read the JSON object in `path`. Raises ValueError if there is none; its message asks for the folder of `what`."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of {what}")
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON; restore it: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def end_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Return the ids, ascending, of the tokens at which vLLM ends a response of the model in a folder.

    They are the tokenizer's own and those of generation_config.json, or of config.json where there is no such file.
    """
    generation, tokenizer, settings = (
        read_object(path) if path.is_file() else {}
        for path in map(Path(folder).joinpath, ("generation_config.json", "tokenizer.json", "tokenizer_config.json"))
    )
    stated = (generation or read_config(folder)).get("eos_token_id")
    token = settings.get("eos_token")
    token = token["content"] if isinstance(token, dict) else token
    added = {entry["id"]: entry for entry in tokenizer.get("added_tokens", ())}
    added |= settings.get("added_tokens_decoder", {})
    own = {int(number) for number, entry in added.items() if entry["content"] == token}
    return tuple(sorted(own | set(stated if isinstance(stated, list) else () if stated is None else (stated,))))


def unused_token_id(folder: str | Path, vocab_size: int) -> int | None:
    """Return the highest id below vocab_size that stands for no token, or else the highest of a special token without a use.

    A use is to be named in the tokenizer's settings or in its chat template. None if there is neither, or no tokenizer.json.
    """
    paths = [Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")]
    if not paths[0].is_file():
        return None
    tokenizer = read_object(paths[0])
    settings = read_object(paths[1]) if paths[1].is_file() else {}
    settings.pop("added_tokens_decoder", None)
    added = {entry["id"]: entry for entry in tokenizer.get("added_tokens", ())}
    vocabulary = tokenizer.get("model", {}).get("vocab") or {}
    known = {*added, *(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))}
    if free := max(set(range(vocab_size)) - known, default=None):
        return free
    named = json.dumps(settings, ensure_ascii=False) + (paths[2].read_text() if paths[2].is_file() else "")
    special = [number for number, entry in added.items() if entry.get("special") and entry["content"] not in named]
    return max(special, default=None)


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model folder, sorted. Raises ValueError naming what is missing."""
    if (folder / INDEX).is_file():
        names = sorted(set(read_object(folder / INDEX).get("weight_map", {}).values()))
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        raise ValueError(
            f"{folder} has no {WEIGHTS} (other weight files: {found}); save the model there with model.save_pretrained"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder}: weight files are missing: {', '.join(missing)}")
    return [folder / name for name in names]


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's `shape` and `dtype` (F32, BF16 and so on) by its name, without reading the data.

    Raises ValueError when the file is truncated or not a safetensors file.
    """
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: {"shape": part.get_shape(), "dtype": part.get_dtype()} for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file, perhaps a git-lfs pointer: {error}") from error


def open_to_readers(path: Path) -> None:
    """Give a file the mode that the umask says. Those that safetensors writes can only be read by their owner."""
    umask = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    path.chmod(0o666 & ~int(umask[1] if umask else "077", 8))


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Replace `path` atomically, so that no reader sees half a file and no crash leaves one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    flush(partial)
    os.replace(partial, path)
