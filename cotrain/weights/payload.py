"""Weights on their way to an engine: written to shared memory, described, and checked on arrival. This imports no vLLM."""

import json
import os
from collections.abc import Iterable, Iterator
from io import BufferedWriter
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from cotrain.records import WeightPayload, WeightUpdateRefused
from cotrain.weights.digests import DigestedFile
from drafters.files import weight_files

Manifest = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype) of every tensor an update must carry

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of number formats in the header of a safetensors file."""

WEIGHTS_UNKNOWN = "the engine's weights are unknown"
"""The error message of an engine that could not return to its last good weights, and so must not continue, contains this text.

vLLM passes on the text of a worker's exception, but not its type."""


def digest(tensor: Tensor) -> str:
    """xxh3 checksum (128 bits) of the tensor's bytes, row-major. It detects accidental corruption, not attacks."""
    return xxhash.xxh3_128_hexdigest(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data


def manifest_of(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Manifest:
    """Return shapes and dtypes of tensors that are sent, or expected, with floating-point ones in `dtype` unless that is None."""
    return {name: (tuple(t.shape), dtype if dtype and t.is_floating_point() else t.dtype) for name, t in tensors}


def write_payload(state: dict[str, Tensor], path: str | Path, dtype: torch.dtype) -> WeightPayload:
    """Write `state` for the engines with write_tensors, floating-point tensors in `dtype`."""
    layout = manifest_of(state.items(), dtype)
    return write_tensors(layout, ((name, tensor.to(layout[name][1])) for name, tensor in state.items()), path)


def write_tensors(layout: Manifest, tensors: Iterable[tuple[str, Tensor]], path: str | Path) -> WeightPayload:
    """Write a safetensors file of the tensors in `layout`. They may come in any order; each is written as it comes.

    The file gets its name when it is complete, so a reader that has an older file of this name open keeps that one.
    Raises OSError when the disk is full.
    """
    path = Path(path)
    order = sorted(layout, key=lambda name: (-layout[name][1].itemsize, name))  # that of the safetensors library
    partial, digests = path.with_suffix(".partial"), dict[str, str]()
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            for name, data in _write(file, layout, order, tensors):
                digests[name] = xxhash.xxh3_128_hexdigest(data)
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return WeightPayload(str(path), path.stat().st_size, digests)


def save_tensors(layout: Manifest, tensors: Iterable[tuple[str, Tensor]], path: str | Path) -> None:
    """Write a safetensors file for a checkpoint, flushed and with its digest beside it, like write_tensors otherwise.

    Tensors that come in the order of `layout`, all of one number format, are written from the first byte to the last.
    """
    with DigestedFile(path) as file:
        for _ in _write(file, layout, sorted(layout, key=lambda name: -layout[name][1].itemsize), tensors):
            pass


def _write(
    file: BufferedWriter, layout: Manifest, order: list[str], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, memoryview]]:
    """Write a safetensors file with the tensors in this order. Yields each name and its bytes, once written."""
    start, places = header(layout, order)
    file.write(start)
    left = set(layout)
    for name, tensor in tensors:
        assert (tuple(tensor.shape), tensor.dtype) == layout[name], f"{name}: {tensor.shape} {tensor.dtype}"
        data = _bytes(tensor)
        if file.tell() != places[name]:
            file.seek(places[name])
        file.write(data)
        left.discard(name)
        yield name, data
        del tensor, data  # to free their memory before the next one is made
    assert not left, f"never came: {sorted(left)[:4]}"


def header(layout: Manifest, names: list[str], metadata: dict[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file with the tensors in this order, and where in the file each tensor begins."""
    sizes = [torch.Size(layout[name][0]).numel() * layout[name][1].itemsize for name in names]
    spans = dict(zip(names, pairwise(accumulate(sizes, initial=0)), strict=True))
    fields = {
        name: {"dtype": DTYPES[layout[name][1]], "shape": layout[name][0], "data_offsets": spans[name]}
        for name in names
    }
    text = json.dumps({"__metadata__": metadata or {"format": "pt"}} | fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, (start, _) in spans.items()}


def read_manifest(folder: str | Path, dtype: torch.dtype, without: Iterable[str] = ()) -> Manifest:
    """Names and shapes of the tensors in a checkpoint folder, floating ones as `dtype`; no weight is read.

    `without` lists name suffixes that are never sent. Raises ValueError when weight files are missing.
    """
    tensors = (item for file in weight_files(Path(folder)) for item in load_file(file).items())
    return manifest_of((item for item in tensors if not item[0].endswith(tuple(without))), dtype)


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
        # aminmax propagates NaN, and takes a twentieth of isfinite's time on a CPU.
        if tensor.is_floating_point() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise WeightUpdateRefused(f"{name} has non-finite values")
    return tensors
