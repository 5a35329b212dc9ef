"""Weight updates inside a vLLM worker: transactional, over shared memory or a file system.

    read and check everything -> load -> read back what is served -> keep as the good state
                |                              |
             refused: nothing was touched   differs: load the last good state again, read it back, then refuse

One good state of the policy is kept, so shared memory holds at most two policies: that one, and the update that is
being written. For a drafter, the good state before it is kept as well, so that an update which another engine has refused
can be undone here.

Every tensor-parallel rank of an engine makes each step, and an update that one of them refuses is refused by all.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cotrain.engine import loading as vllm_weights
from cotrain.weights.payload import WEIGHTS_UNKNOWN, Manifest, WeightUpdateRefused, read_manifest, read_payload
from drafters.files import weight_files

READBACK_COLUMNS = 32
"""Input columns of each packed policy matrix that are read back after an update, others each time. Drafters are read back whole.

An error that persists in one of n columns is found within ceil(n / 32) updates; an error in a share s of the columns is
found at once with probability 1 - (1 - s)^32. Reading all columns takes several times as long."""


class ServedWeights:
    """The weights of the policy or of the drafter as a rank serves them. It takes a whole state dict or nothing of it."""

    def __init__(self, model: nn.Module, model_config: Any, kept: Path, target: nn.Module | None = None):
        """kept: name of a hard link to the last good payload, on the payloads' file system; each rank has its own.

        target: the policy's model beside which a drafter serves; None for the policy itself.
        """
        self.model, self.model_config = model, model_config
        self._is_drafter = target is not None
        self._kept, self._before, self._new = (kept.with_suffix(s) for s in (".safetensors", ".before", ".new"))
        kept.parent.mkdir(parents=True, exist_ok=True)
        self._never_sent = ["rotary_emb.inv_freq"]
        if target is not None:
            self._never_sent += ["t2d", *vllm_weights.modules_shared_with_target(model, target)]
        elif getattr(model_config.hf_config, "tie_word_embeddings", False):
            self._never_sent += ["lm_head.weight"]

    def check(self, path: str, digests: dict[str, str]) -> dict[str, Tensor]:
        """Read and check an update without touching the model. Returns its tensors. Raises WeightUpdateRefused."""
        tensors: dict[str, Tensor] = on_all_ranks(lambda: read_payload(path, digests, self._expected()))
        return tensors

    def update(self, path: str, digests: dict[str, str], turn: int = 0) -> None:
        """Serve an update. Raises WeightUpdateRefused, after which the model serves what it served before.

        turn: each turn reads other columns of packed policy matrices back. Raises RuntimeError with WEIGHTS_UNKNOWN when the
        model could not be brought back to what it served.
        """
        tensors = self.check(path, digests)
        on_all_ranks(lambda: self._keep(path))  # it can fail, so it comes before the model is touched
        try:
            on_all_ranks(lambda: self._serve(tensors, None if self._is_drafter else READBACK_COLUMNS, turn))
        except WeightUpdateRefused as error:
            self.restore()
            raise WeightUpdateRefused(f"update undone: {error}") from error
        if self._is_drafter and self._kept.exists():
            os.replace(self._kept, self._before)
        os.replace(self._new, self._kept)

    def compare(self, path: str, digests: dict[str, str], turn: int) -> None:
        """Compare what is served with the tensors of a file. Raises RuntimeError with WEIGHTS_UNKNOWN where they differ."""
        expected = self._expected()
        wanted = {name: expected[name] for name in digests}
        try:
            on_all_ranks(lambda: self._compare(read_payload(path, digests, wanted), READBACK_COLUMNS, turn))
        except WeightUpdateRefused as error:
            raise RuntimeError(f"{WEIGHTS_UNKNOWN}: they are not those that the learner has sent ({error})") from error

    def undo(self) -> None:
        """Go back to the state before the last update of the drafter."""
        self._kept.unlink(missing_ok=True)
        if self._before.exists():
            os.replace(self._before, self._kept)
        self.restore()

    def last_good(self) -> dict[str, Tensor]:
        """The tensors of the last update, or of the checkpoint that the engine started from."""
        files = [self._kept] if self._kept.exists() else weight_files(Path(self.model_config.model))
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return {name: found[name].to(dtype) for name, (_, dtype) in self._expected().items()}

    def _keep(self, path: str) -> None:
        self._new.unlink(missing_ok=True)
        os.link(path, self._new)

    def _serve(self, tensors: dict[str, Tensor], columns: int | None = None, turn: int = 0) -> None:
        vllm_weights.reload_weights(self.model, self.model_config, tensors)
        self._compare(tensors, columns, turn)

    def _compare(self, tensors: dict[str, Tensor], columns: int | None, turn: int) -> None:
        differing = vllm_weights.differing_tensors(self.model, tensors, columns, turn)
        if differing:
            raise WeightUpdateRefused(f"served weights differ from those sent: {differing[:4]}")

    def _expected(self) -> Manifest:
        """What an update must carry: the tensors of the checkpoint the engine started from, less those that are never sent."""
        return read_manifest(self.model_config.model, self.model_config.dtype, without=self._never_sent)

    def restore(self) -> None:
        """Serve the last good state again. Raises RuntimeError with WEIGHTS_UNKNOWN when that fails."""
        try:
            on_all_ranks(lambda: self._serve(self.last_good()))
        except WeightUpdateRefused as error:
            message = f"{WEIGHTS_UNKNOWN}: the last good ones could not be served again ({error})"
            raise RuntimeError(message) from error


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all tensor-parallel ranks of the engine, in their order. All of them must call it."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    values = [value] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def on_all_ranks(step: Callable[[], Any]) -> Any:
    """Do a step that every rank does. If it fails on any, raises WeightUpdateRefused on all, which names the failed ranks."""
    results, error = [], None
    try:
        results.append(step())
    except Exception as failure:
        error = failure
    reasons = of_all_ranks("" if error is None else str(error) or repr(error))
    if any(reasons):
        named = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        raise WeightUpdateRefused("; ".join(named if len(reasons) > 1 else reasons)) from error
    return results[0]
