"""What an engine serves, and how an update comes into force there. This imports no vLLM."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from cotrain.weights.payload import WEIGHTS_UNKNOWN, Manifest, WeightUpdateRefused, digest, read_manifest, read_payload
from drafters.files import text_tensors, weight_files

READBACK_COLUMNS = 8
"""Input columns of each packed policy matrix that are read back after an update, others each time. Drafters are read back whole.

An error that persists in one of n columns is found within ceil(n / 8) updates; an error in a share s of the columns is
found at once with probability 1 - (1 - s)^8. Reading 32 columns takes twice as long, and all of them several times."""

T = TypeVar("T")


class ServedWeights(ABC):
    """The weights of the policy or of the drafter as a tensor-parallel rank of an engine serves them. An update is

    1. *checked*: file, names, shapes, checksums and finite values, before anything is touched, and with `check` before the engine
       pauses;
    2. *applied* to the model;
    3. *read back*: what the model serves is compared with what was sent, copies that the engine derives from it included;
    4. *undone* if that differs: the last good state is applied and read back, and only then is the update refused.

    All ranks make each step together, and an update that one of them refuses is refused by all. The last good state of the policy
    stays in shared memory, which so holds two policies at most: that one, and the update that is being written. Of a drafter the
    state before it stays too, so that an update which another engine has refused can be undone here.

    The three abstract methods are the receiving end, which cotrain/engine/ implements for vLLM's models.
    """

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, never_sent: Sequence[str], kept: Path, is_drafter: bool = False
    ):
        """checkpoint: folder that the model was loaded from, in `dtype`.

        never_sent: an update has the checkpoint's tensors, except those whose names end in one of these. kept: name of a hard link to
        the last good payload, on the payloads' file system; each rank has its own.
        """
        self._checkpoint, self._dtype, self._never_sent, self._is_drafter = checkpoint, dtype, never_sent, is_drafter
        self._kept, self._before, self._new = (kept.with_suffix(s) for s in (".safetensors", ".before", ".new"))
        self._checked: tuple[str, dict[str, str], dict[str, Tensor]] | None = None
        kept.parent.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load a whole state dict into the model."""

    @abstractmethod
    def differing(self, tensors: dict[str, Tensor], columns: int | None = None, turn: int = 0) -> list[str]:
        """Return the names of the tensors that the model does not serve exactly so. A rank compares its own part.

        columns: how many input columns of packed matrices to compare, others each turn; None compares all.
        """

    @abstractmethod
    def of_all_ranks(self, value: T) -> list[T]:
        """Return the values of all tensor-parallel ranks of the engine, in their order. All of them must call it."""

    def check(self, path: str, digests: dict[str, str]) -> dict[str, Tensor]:
        """Read and check an update without touching the model, and keep its tensors for the next `update`, if it is of them.

        Returns the tensors. Raises WeightUpdateRefused.
        """
        self._checked = None

        def read() -> dict[str, Tensor]:
            self._new.unlink(missing_ok=True)
            os.link(path, self._new)
            return read_payload(path, digests, self._expected())

        tensors = self.on_all_ranks(read)
        self._checked = path, digests, tensors
        return tensors

    def update(self, path: str, digests: dict[str, str], turn: int = 0) -> None:
        """Serve an update. Raises WeightUpdateRefused, after which the model serves what it served before.

        turn: each turn reads other columns of packed policy matrices back. Raises RuntimeError with WEIGHTS_UNKNOWN when the
        model could not be brought back to what it served.
        """
        if self._checked is not None and self._checked[:2] == (path, digests):
            tensors = self._checked[2]
        else:
            tensors = self.check(path, digests)  # what can fail comes before the model is touched
        self._checked = None
        try:
            self.on_all_ranks(lambda: self._serve(tensors, None if self._is_drafter else READBACK_COLUMNS, turn))
        except WeightUpdateRefused as error:
            self.restore()
            raise WeightUpdateRefused(f"update undone: {error}") from error
        if self._kept.exists():
            os.replace(self._kept, self._before)
        os.replace(self._new, self._kept)
        if not self._is_drafter:  # in a thread, because giving the memory back takes a tenth of an update
            Thread(target=self._before.unlink, kwargs={"missing_ok": True}).start()

    def compare(self, path: str, digests: dict[str, str], turn: int) -> None:
        """Compare what is served with the tensors of a file. Raises RuntimeError with WEIGHTS_UNKNOWN where they differ."""
        wanted = {name: layout for name, layout in self._expected().items() if name in digests}
        try:
            self.on_all_ranks(lambda: self._compare(read_payload(path, digests, wanted), READBACK_COLUMNS, turn))
        except WeightUpdateRefused as error:
            raise RuntimeError(f"{WEIGHTS_UNKNOWN}: they are not those that the learner has sent ({error})") from error

    def undo(self) -> None:
        """Go back to the state before the last update of the drafter."""
        self._kept.unlink(missing_ok=True)
        if self._before.exists():
            os.replace(self._before, self._kept)
        self.restore()

    def restore(self) -> None:
        """Serve the last good state again. Raises RuntimeError with WEIGHTS_UNKNOWN when that fails."""
        try:
            self.on_all_ranks(lambda: self._serve(self.last_good()))
        except WeightUpdateRefused as error:
            message = f"{WEIGHTS_UNKNOWN}: the last good ones could not be served again ({error})"
            raise RuntimeError(message) from error

    def last_good(self) -> dict[str, Tensor]:
        """The tensors of the last update, or of the checkpoint that the engine started from."""
        files = [self._kept] if self._kept.exists() else weight_files(self._checkpoint)
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return {name: found[name].to(dtype) for name, (_, dtype) in self._expected().items()}

    def digests(self, good: dict[str, Tensor]) -> dict[str, str]:
        """Return checksums of tensors that should be served; empty for each that a rank does not serve exactly so."""
        differing = self.differing(good)
        own = {name: "" if name in differing else digest(tensor) for name, tensor in good.items()}
        of_ranks = self.of_all_ranks(own)
        return {name: known if all(of[name] == known for of in of_ranks) else "" for name, known in own.items()}

    def on_all_ranks(self, step: Callable[[], T]) -> T:
        """Do a step that every rank does. If it fails on any, raises WeightUpdateRefused on all, which names the failed ranks."""
        results, error = list[T](), None
        try:
            results.append(step())
        except Exception as failure:
            error = failure
        reasons = self.of_all_ranks("" if error is None else str(error) or repr(error))
        if any(reasons):
            named = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
            raise WeightUpdateRefused("; ".join(named if len(reasons) > 1 else reasons)) from error
        return results[0]

    def _serve(self, tensors: dict[str, Tensor], columns: int | None = None, turn: int = 0) -> None:
        self.load(tensors)
        self._compare(tensors, columns, turn)

    def _compare(self, tensors: dict[str, Tensor], columns: int | None, turn: int) -> None:
        differing = self.differing(tensors, columns, turn)
        if differing:
            raise WeightUpdateRefused(f"served weights differ from those sent: {differing[:4]}")

    def _expected(self) -> Manifest:
        tensors = read_manifest(self._checkpoint, self._dtype, without=self._never_sent)
        if self._is_drafter:
            return tensors
        return {name: tensors[name] for name in text_tensors(self._checkpoint, tensors)}  # the learner has no other
