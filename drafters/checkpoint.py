"""Writing a drafter's folder so that it is never half a drafter, and reading its tensors back."""

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.files import CONFIG, WEIGHTS, flush

TRAINED_DEPTH = "trained_draft_positions"
"""Field of config.json with the draft positions that a drafter was trained on."""


def write_folder(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """Write config.json and model.safetensors.

    Whenever the process dies, the folder then holds this drafter, or the one it held before, or none that can be
    loaded (no config.json). Raises OSError when the disk is full.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        try:
            save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors' own type for a full disk too
            raise OSError(f"cannot write {folder / WEIGHTS}: {error}") from error
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for path in (partial / WEIGHTS, partial / CONFIG, partial):
            flush(path)
        if not folder.is_dir() or not any(folder.iterdir()):
            os.replace(partial, folder)
        else:
            # A folder in use cannot be exchanged in one move: it is no drafter until the new config.json is there.
            (folder / CONFIG).unlink(missing_ok=True)
            os.replace(partial / WEIGHTS, folder / WEIGHTS)
            os.replace(partial / CONFIG, folder / CONFIG)
            flush(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Read all tensors of model.safetensors. Raises ValueError when it is missing, truncated or corrupt."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{path} does not exist; drafter weights are read from {WEIGHTS}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt: {error}") from error
