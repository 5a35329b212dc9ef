"""cotrain's weight-transfer backend for vLLM: transactional, over shared memory or a file system.

Runs inside every vLLM worker. vLLM's update session calls it (start -> update -> finish); all of the work happens in
`receive_weights`, so that a refused update never leaves a session half open:

    read and check everything -> load -> read back what is served -> keep as the good state
                |                              |
             refused: nothing was touched   differs: load the last good state again, read it back, then refuse

One good state of the policy is kept, so shared memory holds at most two policies: that one, and the update that is
being written. Of a drafter the good state before is kept as well, so that an update which another engine has refused
can be undone here.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from cotrain.models.loading import weight_files
from cotrain.rollout.vllm import weights as vllm_weights
from cotrain.transport.payload import (
    WEIGHTS_UNKNOWN,
    Manifest,
    WeightUpdateRefused,
    read_manifest,
    read_payload,
)

BACKEND = "cotrain"

READBACK_COLUMNS = 32
"""Input columns of each packed policy matrix read back after an update, others each time. Drafters are read back whole.

An error that stays in one of n columns is found within ceil(n / 32) updates; an error in a share s of the columns is
found at once with probability 1 - (1 - s)^32. Reading all columns takes several times as long."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where this worker keeps a hard link to the last good payload (same file system as the payloads)."""

    keep_folder: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update. The read-back of a packed policy matrix begins with other columns at each `readback_turn`.

    check: read and check, and touch nothing. undo: go back to the state before the last update of the drafter; no other
    field counts.
    """

    path: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    readback_turn: int = 0
    action: Literal["apply", "check", "undo"] = "apply"


class TransactionalWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies whole state dicts or nothing."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update: ClassVar[bool] = True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.keep_folder = Path(init_info.keep_folder)
        self.keep_folder.mkdir(parents=True, exist_ok=True)

    def start_weight_update(self) -> None:
        """The model is only touched once a complete update has passed its checks."""

    def finish_weight_update(self) -> None:
        """`receive_weights` leaves the model whole."""

    def shutdown(self) -> None:
        """There is no connection to close."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Apply one whole update. Raises WeightUpdateRefused; the engine then serves what it served before.

        Raises RuntimeError with WEIGHTS_UNKNOWN when it could not be brought back to that.
        """
        if update_info.action == "undo":
            self._undo()
            return
        tensors = read_payload(update_info.path, update_info.digests, self._expected())
        if update_info.action == "check":
            return
        kept = self._kept()
        link = kept.with_suffix(".new")
        link.unlink(missing_ok=True)
        os.link(update_info.path, link)  # it can fail, so it comes before the model is touched
        try:
            columns = None if self._is_draft() else READBACK_COLUMNS
            self._serve(tensors, columns, update_info.readback_turn)
        except Exception as error:
            self._restore()
            raise WeightUpdateRefused(f"update undone: {error}") from error
        if self._is_draft() and kept.exists():
            os.replace(kept, kept.with_suffix(".before"))
        os.replace(link, kept)

    def _serve(self, tensors: dict[str, torch.Tensor], columns: int | None = None, turn: int = 0) -> None:
        vllm_weights.reload_weights(self.model, self.model_config, tensors)
        differing = vllm_weights.differing_tensors(self.model, tensors, columns, turn)
        if differing:
            raise WeightUpdateRefused(f"served weights differ from those loaded: {differing[:4]}")

    def _is_draft(self) -> bool:
        return self.model is not self._default_model

    def _expected(self) -> Manifest:
        """What an update must carry: the tensors of the checkpoint the engine started from, less the shared ones."""
        shared = ["rotary_emb.inv_freq"]
        if self._is_draft():
            shared += ["t2d", *vllm_weights.modules_shared_with_target(self.model, self._default_model)]
        elif getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            shared += ["lm_head.weight"]
        return read_manifest(self.model_config.model, self.model_config.dtype, without=shared)

    def _kept(self) -> Path:
        """The state that is served, once there was an update; `.before` is the one before, `.new` the next."""
        return self.keep_folder / ("drafter.safetensors" if self._is_draft() else "target.safetensors")

    def _undo(self) -> None:
        kept = self._kept()
        kept.unlink()
        if kept.with_suffix(".before").exists():
            os.replace(kept.with_suffix(".before"), kept)
        self._restore()

    def _restore(self) -> None:
        """Serve the last good state: the kept one, or the checkpoint that the engine started from.

        Raises RuntimeError when that fails, or when something else is served then.
        """
        try:
            kept, expected = self._kept(), self._expected()
            files = [kept] if kept.exists() else weight_files(Path(self.model_config.model))
            found = {name: tensor for file in files for name, tensor in load_file(file).items()}
            self._serve({name: found[name].to(dtype) for name, (_, dtype) in expected.items()})
        except Exception as error:
            message = f"{WEIGHTS_UNKNOWN}: the last good ones could not be served again ({error})"
            raise RuntimeError(message) from error


WeightTransferEngineFactory.register_engine(BACKEND, TransactionalWeightTransfer)
