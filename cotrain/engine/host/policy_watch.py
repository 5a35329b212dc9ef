"""Notices when a host changes its policy's weights, and writes the two matrices of each version that the trainer needs.

Hosts load weights in many ways. Every way that vLLM offers is wrapped. A host that writes into parameters directly is noticed
by comparing a few hundred of their elements whenever the engine starts on new requests while no others run.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from cotrain.engine import loading as weights
from cotrain.engine.interface import wrap
from cotrain.weights.payload import write_payload

KEPT_VERSIONS = 2
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
MATRIX_ELEMENTS, VECTOR_ELEMENTS = 128, 4  # about how many elements of each matrix and each vector are compared
UPDATES = ("finish_weight_update", "reload_weights", "wake_up")  # methods of a worker that may change its weights


class PolicyWatch:
    """Watches the policy of one worker, a tensor-parallel rank of the engine. Its versions count from 0."""

    def __init__(self, worker: Any, folder: Path):
        """folder: where rank 0 writes the matrices of each version."""
        self._worker, self._folder = worker, folder
        self._model: nn.Module = worker.model_runner.get_model()
        self._in_update = self._opened = False
        self.is_dirty = False  # whether the weights that are served may differ from those of `version`
        self.version = -1
        self.count()
        self.is_followed = True  # does the whole engine serve what belongs to `version`, with the drafter loaded again?
        self._waits = worker.vllm_config.load_config.load_format != "dummy"  # else there are no weights as yet

    def hook_in(self) -> None:
        """Notice updates from now on."""
        wrap(self._model, "load_weights", self._load)
        for name in UPDATES:
            wrap(self._worker, name, self._update)

    def _load(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let a host load weights, into a CPU build even outside of vLLM's own update and one parameter at a time.

        The CPU build keeps linear weights packed, so a plain load has nowhere to write to. vLLM then keeps tensors until it has all
        of a layer, so it gets copies: hosts such as verl use the same memory for the next ones. Errors in here are the host's,
        because this is part of its own load. `finish` ends the load before the next step.
        """
        self.is_dirty = True
        in_session = self._in_update or getattr(self._worker, "_weight_update_active", False)
        packs = self._worker.device.type == "cpu" and not in_session
        if packs and not any(p.is_meta for p in self._model.parameters()):
            initialize_layerwise_reload(self._model)
            self._opened = True
        if self._opened:
            weights, *rest = args or (kwargs.pop("weights"),)
            args = ((name, tensor.clone()) for name, tensor in weights), *rest
        with set_current_vllm_config(self._worker.vllm_config):
            return load(*args, **kwargs)

    def _update(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_update = True
        try:
            return update(*args, **kwargs)
        finally:
            self._in_update, self.is_dirty = False, True

    def finish(self) -> None:
        """End a load that `_load` has begun, if there is one."""
        if self._opened:
            self._opened = False
            with set_current_vllm_config(self._worker.vllm_config):
                weights.finish_reload(self._model, self._worker.model_config)

    def has_moved(self) -> bool:
        """Do the compared elements differ from those of `version`?"""
        return not torch.equal(self._elements(), self._known)

    def count(self) -> None:
        """Count a new version: the weights that are served now."""
        self.version, self._known, self._waits, self.is_dirty = self.version + 1, self._elements(), True, False
        self.is_written = self.is_followed = False  # is_written: are embedding and head of `version` written?

    def write(self) -> None:
        """Write embedding and head of `version` if that was not tried before. A full disk leaves them out. All ranks call it."""
        if not self._waits:
            return
        self._waits = False
        whole = {name: _whole(matrix) for name, matrix in self._matrices().items()}
        if self._worker.rank != 0:
            return
        with suppress(OSError):
            path = self._folder / f"{self.version}.safetensors"
            write_payload(whole, path, self._worker.model_config.dtype)
            self.is_written = True
        for old in sorted(self._folder.glob("[0-9]*.safetensors"), key=lambda file: int(file.stem))[:-KEPT_VERSIONS]:
            old.unlink()

    def _matrices(self) -> dict[str, VocabParallelEmbedding]:
        """Return embedding and head by Hugging Face's names of their weights; a head tied to the embedding is left out.

        Raises ValueError when one of them is quantised. Other weights may be.
        """
        found = [module for module in self._model.modules() if isinstance(module, VocabParallelEmbedding)]
        embeddings = [module for module in found if not isinstance(module, ParallelLMHead)]
        if unreadable := [type(module).__name__ for module in found if not hasattr(module, "weight")]:
            raise ValueError(
                f"a {unreadable[0]} has no plain weight, from which a drafter learns: quantise other layers alone"
            )
        tied = [e.weight for e in embeddings]
        heads = [m for m in found if isinstance(m, ParallelLMHead) and not any(m.weight is w for w in tied)]
        if len(embeddings) != 1 or len(heads) > 1:
            raise ValueError(f"there are {len(embeddings)} embeddings and {len(heads)} heads, and not one of each")
        named = [*zip(("model.embed_tokens.weight", "lm_head.weight"), [*embeddings, *heads], strict=False)]
        if packed := [name for name, module in named if module.weight.dtype not in PLAIN]:
            raise ValueError(
                f"{packed[0]} is quantised, from which a drafter cannot learn: quantise other layers alone"
            )
        return dict(named)

    def _elements(self) -> Tensor:
        vectors = [p.detach() for p in self._model.parameters() if p.dim() == 1 and p.numel()]
        parts = [(MATRIX_ELEMENTS, m.weight.detach().flatten()) for m in self._matrices().values()]
        parts += [(VECTOR_ELEMENTS, vector) for vector in vectors]
        return torch.cat([part[:: max(1, len(part) // number)].float() for number, part in parts]).cpu()


def _whole(matrix: VocabParallelEmbedding) -> Tensor:
    """Return the rows [V, H] of the vocabulary of all ranks together. Each has as many rows of the padded one."""
    rows, size = matrix.weight.detach(), matrix.org_vocab_size
    return (get_tp_group().all_gather(rows, 0) if len(rows) < size else rows)[:size]
