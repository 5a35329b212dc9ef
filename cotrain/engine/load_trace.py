"""Where vLLM's loader puts a checkpoint's tensors, whatever the layout: the model loads tensors that have a shape but no data.

A dispatch mode sees each copy: which strided box of which tensor goes to which box of which parameter. Nothing is read, moved or
allocated, so a trace takes a hundredth to a tenth of a second. Each tensor-parallel rank records its own part.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cotrain.weights.payload import Manifest

MOVES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
FILLS = {torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}


class Box(NamedTuple):
    """A strided part of a contiguous tensor; stride and offset count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`, which may be strided itself but has the shape that the box was made for."""
        strides = contiguous(tensor.shape), tensor.stride()
        return tensor.as_strided(*self.moved(tensor.shape, *strides, int(tensor.storage_offset())))

    def moved(self, shape: Any, old: Any, new: Any, offset: int = 0) -> "Box":
        """The box in a tensor of `shape` when the tensor's strides change from `old` to `new`, where it begins at `offset`."""

        def renumbered(number: int) -> int:
            total = 0
            for size, step, new_step in sorted(zip(shape, old, new, strict=True), key=lambda dim: -dim[1]):
                if step and size > 1:
                    count, number = divmod(number, step)
                    total += count * new_step
            return total

        return Box(self.shape, tuple(map(renumbered, self.stride)), offset + renumbered(self.offset))


@dataclass
class Loaded:
    """A parameter or buffer as it is loaded. places: (module, attribute) of all that share it. copies: (to, name, from)."""

    shape: torch.Size
    places: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[Box, str, Box]] = field(default_factory=list)


class LoadTrace(NamedTuple):
    """loaded: the parameters that get anything. arithmetic: names of tensors that the loader computes with."""

    loaded: list[Loaded]
    arithmetic: set[str]


class _Recorder(TorchDispatchMode):
    """Adds each copy of a source into a target to what is loaded there."""

    def __init__(self, sources: dict[str, Tensor], targets: list[tuple[Tensor, Loaded]]):
        super().__init__()
        self.arithmetic: set[str] = set()
        self._targets = {_storage(tensor): (tensor, loaded) for tensor, loaded in targets}
        self._names = {_storage(tensor): {name} for name, tensor in sources.items()}
        self._moved = {_storage(tensor): (tensor, name, _box(tensor)) for name, tensor in sources.items()}
        self._alive: list[Tensor] = []  # a storage's address is its name here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), result))
        names = set[str]().union(*(self._names.get(_storage(tensor), ()) for tensor in read))
        for tensor in written:
            self._names.setdefault(_storage(tensor), set()).update(names)
        self._alive += written
        if func is torch.ops.aten.copy_.default:
            self._copy(*args[:2])
        elif func in MOVES and (source := self._source(args[0])) is not None:
            self._moved.setdefault(_storage(result), (result, *source))
        elif func._schema.is_mutable and func not in FILLS and any(_storage(t) in self._targets for t in written):
            self.arithmetic |= names
        return result

    def _copy(self, to: Tensor, what: Tensor) -> None:
        if (target := self._targets.get(_storage(to))) is None:
            return
        whole, loaded = target
        if (source := self._source(what.expand(to.shape))) is None:
            self.arithmetic |= self._names.get(_storage(what), set())
        else:
            loaded.copies.append((_box(to).moved(whole.shape, whole.stride(), contiguous(whole.shape)), *source))

    def _source(self, tensor: Tensor) -> tuple[str, Box] | None:
        """The name and the box of which the tensor is a copy, unless its elements are computed."""
        if (known := self._moved.get(_storage(tensor))) is None:
            return None
        whole, name, source = known
        return name, _box(tensor).moved(whole.shape, whole.stride(), source.stride, source.offset)


def contiguous(shape: Any) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _box(tensor: Tensor) -> Box:
    return Box(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_TRACES: WeakKeyDictionary[nn.Module, tuple[Manifest, LoadTrace]] = WeakKeyDictionary()
"""The last trace of each model: updates of one layout need no other."""


def names_by_module(trace: LoadTrace) -> dict[str, set[str]]:
    """Return the names of the tensors that each module, by its path, is loaded from."""
    names = defaultdict[str, set[str]](set)
    for loaded in trace.loaded:
        for path, _ in loaded.places:
            names[path] |= {name for _, name, _ in loaded.copies}
    return names


def trace_of(model: nn.Module, layout: Manifest) -> LoadTrace:
    """Return what the model's loader does with tensors of these names and shapes. Only a change of layout is traced again."""
    if model not in _TRACES or _TRACES[model][0] != layout:
        _TRACES[model] = layout, _trace(model, layout)
    return _TRACES[model][1]


@torch.no_grad()
def _trace(model: Any, layout: Manifest) -> LoadTrace:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in layout.items()}
    with _on_meta(model) as targets, disable_mtp_completeness_check():
        recorder = _Recorder(given, targets)
        try:
            with recorder:
                model.load_weights(iter(given.items()))
        except Exception:  # the model refuses a name or a shape among them, so they are loaded one by one
            for item in given.items():
                with suppress(Exception), recorder:
                    model.load_weights(iter([item]))
    return LoadTrace([loaded for _, loaded in targets if loaded.copies], recorder.arithmetic)


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[list[tuple[Tensor, Loaded]]]:
    """Put tensors without data in place of the model's parameters and buffers, in the layout that vLLM loads into."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    name_loaders(model)
    before = [(module, dict(vars(module))) for module in model.modules()]  # a load may set attributes as well
    targets: dict[int, tuple[Tensor, Loaded]] = {}
    try:
        for path, module in model.named_modules():
            layout = get_layerwise_info(module).restore_metadata
            for kind, recorded in zip(("_parameters", "_buffers"), layout, strict=True):
                live = vars(module)[kind]
                unrecorded = {n: t for n, t in live.items() if t is None or n in SKIP_TENSORS}
                vars(module)[kind] = tensors = unrecorded | recorded
                for leaf, tensor in [(leaf, tensor) for leaf, tensor in tensors.items() if tensor is not None]:
                    shared = id(tensor if live.get(leaf) is None else live[leaf])
                    if shared not in targets:
                        meta = restore_layer_refs(to_meta_tensor(tensor), module)
                        meta.weight_loader = _get_original_loader(meta)
                        targets[shared] = meta, Loaded(meta.shape)
                    tensors[leaf], loaded = targets[shared]
                    loaded.places.append((path, leaf))
        yield list(targets.values())
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def name_loaders(model: nn.Module) -> None:
    """Give weight loaders that are objects a `__name__`, without which vLLM's reload fails (MiniMax-M2 has partial functions)."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        recorded = get_layerwise_info(module).restore_metadata
        for tensor in [*recorded[0].values(), *recorded[1].values(), *module.parameters(recurse=False)]:
            if (loader := getattr(tensor, "weight_loader", None)) is not None and not hasattr(loader, "__name__"):
                loader.__name__ = type(loader).__name__
