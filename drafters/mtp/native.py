"""MTP heads inside a policy's checkpoint: split off before training, stitched back for export.

Split, the policy is a plain model that a learner trains, and the head a drafter's folder: no gradient of one can reach
the other. Stitched, they are one folder again, with the configuration it came with, whose head stock vLLM speculates
with.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.base import CONFIG, WEIGHTS, read_config, read_tensors
from drafters.mtp.formats import NATIVE_ARCHITECTURES, NUM_HEADS, HeadFormat

INDEX = "model.safetensors.index.json"
HEAD_FILE = "model-mtp.safetensors"
WHOLE_CONFIG = "whole_config.json"
"""In the head's folder: config.json of the checkpoint that held both."""


def has_native_head(folder: Path) -> bool:
    """Does a model folder hold an MTP head of a known format?"""
    known = NATIVE_ARCHITECTURES.get((read_config(folder).get("architectures") or [""])[0])
    return known is not None and any(name.startswith(known.tensors) for name, _ in _names(folder))


def write_policy(folder: Path, out: Path) -> None:
    """Write config.json and weights of a model folder without its MTP heads into the folder `out`."""
    config, known = _config_and_format(folder)
    weight_map: dict[str, str] = {}
    for file in _files(folder):
        tensors = {name: t for name, t in load_file(folder / file).items() if not name.startswith(known.tensors)}
        if tensors:
            save_file(tensors, out / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
    if (folder / INDEX).is_file():
        _write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map})
    plain = {name: value for name, value in config.items() if name not in (NUM_HEADS, "auto_map")}
    _write_json(out / CONFIG, plain | known.policy_config)


def write_head(folder: Path, out: Path) -> None:
    """Write the MTP heads of a model folder into the folder `out`: a drafter, and the configuration of the whole."""
    config, known = _config_and_format(folder)
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        tensors |= {name: t for name, t in load_file(folder / file).items() if name.startswith(known.tensors)}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    _write_json(out / CONFIG, config | known.config)
    _write_json(out / WHOLE_CONFIG, config)


def stitch(policy: Path, head: Path, split_head: Path, out: Path) -> None:
    """Write policy and head as one model into the folder `out`, under the configuration that they once came with.

    split_head: what `write_head` wrote; head: the drafter that takes its place, in the policy's number format. Raises
    ValueError when that one is of another format.
    """
    whole_config = json.loads((split_head / WHOLE_CONFIG).read_text())
    known = NATIVE_ARCHITECTURES[whole_config["architectures"][0]]
    tensors = read_tensors(head)
    foreign = [name for name in tensors if not name.startswith(known.tensors)]
    if foreign:
        raise ValueError(f"{head} does not belong into a {whole_config['architectures'][0]}: it holds {foreign[0]}")
    weight_map = dict(_names(policy))
    dtypes = set()
    for file in _files(policy):
        part = load_file(policy / file)
        dtypes |= {tensor.dtype for tensor in part.values()}
        save_file(part, out / file, metadata={"format": "pt"})
    if len(dtypes) == 1:
        (dtype,) = dtypes
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        whole_config = {name: value for name, value in whole_config.items() if name != "dtype"}
        whole_config["torch_dtype"] = str(dtype).removeprefix("torch.")
    save_file(tensors, out / HEAD_FILE, metadata={"format": "pt"})
    _write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map | dict.fromkeys(tensors, HEAD_FILE)})
    _write_json(out / CONFIG, whole_config)


def _config_and_format(folder: Path) -> tuple[dict[str, Any], HeadFormat]:
    config = read_config(folder)
    return config, NATIVE_ARCHITECTURES[config["architectures"][0]]


def _files(folder: Path) -> list[str]:
    return sorted({file for _, file in _names(folder)})


def _names(folder: Path) -> Iterator[tuple[str, str]]:
    """(tensor name, file name) of every tensor."""
    if (folder / INDEX).is_file():
        yield from json.loads((folder / INDEX).read_text())["weight_map"].items()
    elif (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            yield from ((name, WEIGHTS) for name in file.keys())  # noqa: SIM118


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
