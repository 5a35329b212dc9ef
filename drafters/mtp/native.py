"""MTP heads inside a policy's checkpoint: split off before training, stitched back for export.

After the split, the policy is a plain model that a learner trains, and the head is a drafter's folder. No gradient of one can
reach the other. Stitched, they are one folder with its original configuration again, and stock vLLM speculates with the head.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from drafters.base import read_tensors, save_tensors
from drafters.files import (
    CONFIG,
    INDEX,
    WEIGHTS,
    read_config,
    safetensors_header,
    text_fields,
    weight_files,
    write_json,
)
from drafters.mtp.formats import NATIVE_ARCHITECTURES, SHARED, HeadFormat, without_head

WHOLE_CONFIG = "whole_config.json"  # file in the head's folder: the config.json of the checkpoint that held both


def has_native_head(folder: Path) -> bool:
    """Say whether a model folder holds an MTP head of a known format."""
    config = read_config(folder)
    if (config.get("architectures") or [""])[0] not in NATIVE_ARCHITECTURES:
        return False
    known = _format(config)
    return any(name.startswith(known.tensors) for file in weight_files(folder) for name in safetensors_header(file))


def _format(config: dict[str, Any]) -> HeadFormat:
    return NATIVE_ARCHITECTURES[config["architectures"][0]].behind(text_fields(config).get("num_hidden_layers", 0))


def split(folder: Path, policy: Path, head: Path) -> None:
    """Split a model folder into two new folders: `policy`, a model without MTP heads, and `head`, a drafter."""
    policy.mkdir()
    head.mkdir()
    config = read_config(folder)
    known = _format(config)
    head_tensors: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    for file in weight_files(folder):
        tensors = load_file(file)
        head_tensors |= {name: tensors.pop(name) for name in list(tensors) if name.startswith(known.tensors)}
        if tensors:
            save_tensors(tensors, policy / file.name)
            weight_map |= dict.fromkeys(tensors, file.name)
    if (folder / INDEX).is_file():
        write_json(policy / INDEX, {"metadata": {}, "weight_map": weight_map})
    write_json(policy / CONFIG, without_head(config))
    save_tensors({name: tensor for name, tensor in head_tensors.items() if not name.endswith(SHARED)}, head / WEIGHTS)
    own = {name: value for name, value in text_fields(config).items() if not name.endswith("_config")}
    write_json(head / CONFIG, own | {"architectures": [known.architecture], "model_type": known.model_type})
    write_json(head / WHOLE_CONFIG, config)


def stitched(head: Path, split_head: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what makes a policy one model with its head again: the config.json that both had, and the head's tensors.

    split_head: the head that `split` wrote. head: the drafter that takes its place. Raises ValueError when its checkpoint format is
    another one.
    """
    config, tensors = json.loads((split_head / WHOLE_CONFIG).read_text()), read_tensors(head)
    if foreign := sorted(tensors.keys() ^ safetensors_header(split_head / WEIGHTS).keys()):
        raise ValueError(f"{head} does not belong into a {config['architectures'][0]}: one of them has no {foreign[0]}")
    return config, tensors
