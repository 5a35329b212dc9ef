"""Weights on their way to an engine: writing them, describing them, checking them. No vLLM here."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cotrain.models.loading import weight_files
from cotrain.records import WeightPayload

Manifest = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> (shape, dtype) of every tensor an update must carry."""

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


WEIGHTS_UNKNOWN = "the engine's weights are unknown"
"""In the message of every WeightsUnknown: vLLM hands on the text of a worker's exception, not its type."""


class WeightUpdateRefused(ValueError):
    """An update that was not applied; the engine goes on serving the weights it had."""


class WeightsUnknown(RuntimeError):
    """The engine could not be brought back to its last good weights, so it must not go on."""

    def __init__(self, reason: object):
        super().__init__(f"{WEIGHTS_UNKNOWN}: the last good ones could not be served again ({reason})")


def digest(tensor: Tensor) -> str:
    """blake2b of the tensor's bytes, row-major."""
    flat = tensor.detach().contiguous().cpu().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def write_payload(state: dict[str, Tensor], path: str | Path, dtype: torch.dtype) -> WeightPayload:
    """Write `state` for the engines, floating tensors in `dtype`.

    The file appears under its name only when complete. Raises OSError when the disk is full.
    """
    path = Path(path)
    tensors = {
        name: (tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.detach().cpu()).contiguous()
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
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    return WeightPayload(str(path), path.stat().st_size, digests)


def read_manifest(folder: str | Path, dtype: torch.dtype, without: Iterable[str] = ()) -> Manifest:
    """Names and shapes in a checkpoint folder's safetensors headers, floating tensors as `dtype`.

    `without` lists name suffixes that are never sent. Raises ValueError when weight files are missing.
    """
    manifest: Manifest = {}
    suffixes = tuple(without)
    for file in weight_files(Path(folder)):
        for name, (shape, stored) in read_header(file).items():
            if not (suffixes and name.endswith(suffixes)):
                manifest[name] = (shape, dtype if stored.is_floating_point else stored)
    return manifest


def read_header(file: str | Path) -> Manifest:
    """Names, shapes and dtypes of one safetensors file, without reading a tensor."""
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {
        name: (tuple(entry["shape"]), SAFETENSORS_DTYPES[entry["dtype"]])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_payload(path: str, digests: dict[str, str], expected: Manifest) -> dict[str, Tensor]:
    """Read and check an update before any weight is touched.

    Raises WeightUpdateRefused when the file cannot be read, when names, shapes or dtypes are not `expected`, when
    bytes differ from what the sender wrote, or when a value is not finite.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # clone: the file may be deleted while the engine still packs these tensors
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own Rust-side types for truncated files
        raise WeightUpdateRefused(f"cannot read {path}: {error}") from error
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise WeightUpdateRefused(f"tensors missing: {missing[:4]}, not expected: {extra[:4]}")
    for name, tensor in tensors.items():
        shape, dtype = expected[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise WeightUpdateRefused(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the engine serves {shape} {dtype}"
            )
        if digest(tensor) != digests.get(name):
            raise WeightUpdateRefused(f"{name} is not the tensor the sender wrote (checksum differs)")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise WeightUpdateRefused(f"{name} has non-finite values")
    return tensors
