"""Weights on their way to an engine: written to shared memory, described, and checked on arrival. No vLLM here."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cotrain.models.loading import weight_files
from cotrain.records import WeightPayload

Manifest = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> (shape, dtype) of every tensor an update must carry."""

WEIGHTS_UNKNOWN = "the engine's weights are unknown"
"""In the message of an engine that could not be brought back to its last good weights, and so must not go on.

vLLM hands on the text of a worker's exception, not its type."""


class WeightUpdateRefused(ValueError):
    """An update that was not applied; the engine goes on serving the weights it had."""


def digest(tensor: Tensor) -> str:
    """xxh3 checksum (128 bits) of the tensor's bytes, row-major. It finds accidents, and is not meant against attacks."""
    flat = tensor.detach().contiguous().cpu().flatten()
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def write_payload(state: dict[str, Tensor], path: str | Path, dtype: torch.dtype) -> WeightPayload:
    """Write `state` for the engines, floating tensors in `dtype`.

    The file takes its name when it is complete, so a reader that has an older file of this name open keeps that one.
    Raises OSError when the disk is full.
    """
    path = Path(path)
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in state.items()
    }
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, str(partial))
        os.replace(partial, path)
    except SafetensorError as error:  # safetensors' own type for a full disk too
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return WeightPayload(str(path), path.stat().st_size, {name: digest(tensor) for name, tensor in tensors.items()})


def read_manifest(folder: str | Path, dtype: torch.dtype, without: Iterable[str] = ()) -> Manifest:
    """Names and shapes of the tensors in a checkpoint folder, floating ones as `dtype`; no weight is read.

    `without` lists name suffixes that are never sent. Raises ValueError when weight files are missing.
    """
    return {
        name: (tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype)
        for file in weight_files(Path(folder))
        for name, tensor in load_file(file).items()
        if not name.endswith(tuple(without))
    }


def read_payload(path: str, digests: dict[str, str], expected: Manifest) -> dict[str, Tensor]:
    """Read and check an update before any weight is touched. The tensors are mapped from the file, not copied.

    Raises WeightUpdateRefused when the file cannot be read, when names, shapes or dtypes are not `expected`, when
    bytes differ from what the sender wrote, or when a value is not finite.
    """
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises its own Rust-side types for truncated files
        raise WeightUpdateRefused(f"cannot read {path}: {error}") from error
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise WeightUpdateRefused(f"tensors missing: {missing[:4]}, not expected: {extra[:4]}")
    for name, tensor in tensors.items():
        shape, dtype = expected[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise WeightUpdateRefused(f"{name} is {found}, the engine serves {shape} {dtype}")
        if digest(tensor) != digests.get(name):
            raise WeightUpdateRefused(f"{name} is not the tensor the sender wrote (checksum differs)")
        # aminmax passes NaN on, and takes a twentieth of isfinite's time on a CPU.
        if tensor.is_floating_point() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise WeightUpdateRefused(f"{name} has non-finite values")
    return tensors
