"""What an engine serves, and how an update comes into force there."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cotrain.engine import loading
from cotrain.engine.load_trace import names_by_module, trace_of
from cotrain.weights.payload import WEIGHTS_UNKNOWN, Manifest, WeightUpdateRefused, digest, read_manifest, read_payload
from drafters.files import text_tensors, weight_files

READBACK_COLUMNS = 8
"""Input columns of each packed policy matrix that are read back after an update, others each time. Drafters are read back whole.

An error that persists in one of n columns is found within ceil(n / 8) updates; an error in a share s of the columns is
found at once with probability 1 - (1 - s)^8. Reading 32 columns takes twice as long, and all of them several times."""

T = TypeVar("T")


class ServedWeights:
    """The weights of the policy or of the drafter as a tensor-parallel rank of an engine serves them. An update is

    1. *checked*: file, names, shapes, checksums and finite values, before anything is touched, and with `check` before the engine
       pauses;
    2. *applied* to the model;
    3. *read back*: what the model serves is compared with what was sent, copies that the engine derives from it included;
    4. *undone* if that differs: the last good state is applied and read back, and only then is the update refused.

    All ranks make each step together, and an update that one of them refuses is refused by all. The last good state of the policy
    stays in shared memory, which so holds two policies at most: that one, and the update that is being written. Of a drafter the
    state before it stays too, so that an update which another engine has refused can be undone here.
    """

    def __init__(
        self, model: nn.Module, model_config: Any, kept: Path, target: nn.Module | None = None, adapters: bool = False
    ):
        """model, model_config: vLLM's. target: the policy's model beside which a drafter serves; None for the policy itself.

        kept: name of a hard link to the last good payload, on the payloads' file system; each rank has its own. adapters: an update
        carries the tensors that adapters change, and those that vLLM loads together with them; the others stay those of the checkpoint.
        """
        self._adapters = adapters
        self.model, self._model_config, self._is_drafter = model, model_config, target is not None
        self._never_sent = ["rotary_emb.inv_freq"]  # endings of names of the checkpoint
        if target is not None:
            self._never_sent += ["t2d", *loading.modules_shared_with_target(model, target)]
        elif getattr(model_config.hf_text_config, "tie_word_embeddings", False):
            self._never_sent += ["lm_head.weight"]
        self._kept, self._before, self._new = (kept.with_suffix(s) for s in (".safetensors", ".before", ".new"))
        self._checked: tuple[str, dict[str, str], dict[str, Tensor]] | None = None
        kept.parent.mkdir(parents=True, exist_ok=True)

    def check_loading(self) -> None:
        """Raise ValueError that names what an update could not compare: tensors that vLLM computes with while it loads them."""
        if computed := sorted(trace_of(self.model, self._expected()).arithmetic):
            architecture = type(self.model).__name__
            message = f"vLLM's {architecture} computes with {computed[:4]} while it loads them, so that updates could not be checked"
            raise ValueError(f"{message}; train a policy of another architecture")

    def check(self, path: str, digests: dict[str, str]) -> dict[str, Tensor]:
        """Read and check an update without touching the model, and keep its tensors for the next call, if it is of them.

        Returns the tensors. Raises WeightUpdateRefused.
        """
        if self._checked is not None and self._checked[:2] == (path, digests):
            return self._checked[2]
        self._checked = None

        def read() -> dict[str, Tensor]:
            self._new.unlink(missing_ok=True)
            os.link(path, self._new)
            return read_payload(path, digests, self._changed(digests) if self._adapters else self._expected())

        tensors = on_all_ranks(read)
        self._checked = path, digests, tensors
        return tensors

    def update(self, path: str, digests: dict[str, str], turn: int = 0) -> None:
        """Serve an update. Raises WeightUpdateRefused, after which the model serves what it served before.

        turn: each turn reads other columns of packed policy matrices back. Raises RuntimeError with WEIGHTS_UNKNOWN when the
        model could not be brought back to what it served.
        """
        tensors = self.check(path, digests)  # what can fail comes before the model is touched
        self._checked = None
        try:
            on_all_ranks(lambda: self._serve(tensors, None if self._is_drafter else READBACK_COLUMNS, turn))
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
            on_all_ranks(lambda: self._compare(read_payload(path, digests, wanted), READBACK_COLUMNS, turn))
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
            on_all_ranks(lambda: self._serve(self.last_good()))
        except WeightUpdateRefused as error:
            message = f"{WEIGHTS_UNKNOWN}: the last good ones could not be served again ({error})"
            raise RuntimeError(message) from error

    def last_good(self) -> dict[str, Tensor]:
        """The tensors of the last update, or of the checkpoint that the engine started from."""
        files = [] if self._kept.exists() and not self._adapters else weight_files(Path(self._model_config.model))
        files += [self._kept] * self._kept.exists()
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return {name: found[name].to(dtype) for name, (_, dtype) in self._expected().items()}

    def digests(self, good: dict[str, Tensor]) -> dict[str, str]:
        """Return checksums of tensors that should be served; empty for each that a rank does not serve exactly so."""
        differing = loading.differing_tensors(self.model, good)
        own = {name: "" if name in differing else digest(tensor) for name, tensor in good.items()}
        of_ranks = of_all_ranks(own)
        return {name: known if all(of[name] == known for of in of_ranks) else "" for name, known in own.items()}

    def _serve(self, tensors: dict[str, Tensor], columns: int | None = None, turn: int = 0) -> None:
        reload = loading.reload_modules if self._adapters else loading.reload_weights
        reload(self.model, self._model_config, tensors)
        self._compare(tensors, columns, turn)

    def _compare(self, tensors: dict[str, Tensor], columns: int | None, turn: int) -> None:
        differing = loading.differing_tensors(self.model, tensors, columns, turn)
        if differing:
            raise WeightUpdateRefused(f"served weights differ from those sent: {differing[:4]}")

    def _changed(self, names: Iterable[str]) -> Manifest:
        """Those of the tensors that an update of adapters carries. Raises WeightUpdateRefused if others are loaded together with them."""
        expected, changed = self._expected(), {*names}
        for together in names_by_module(trace_of(self.model, expected)).values():
            if changed & together and (missing := sorted(together - changed)):
                raise WeightUpdateRefused(f"tensors missing: {missing[:4]}, which vLLM loads together with others")
        return {name: expected[name] for name in expected if name in changed}

    def _expected(self) -> Manifest:
        """The tensors that an update must carry: those of the checkpoint that are sent."""
        checkpoint = Path(self._model_config.model)
        tensors = read_manifest(checkpoint, self._model_config.dtype, without=self._never_sent)
        if self._is_drafter:
            return tensors
        return {name: tensors[name] for name in text_tensors(checkpoint, tensors)}  # the learner has no other


def on_all_ranks(step: Callable[[], T]) -> T:
    """Do a step that every rank does. If it fails on any, raises WeightUpdateRefused on all, which names the failed ranks."""
    results, error = list[T](), None
    try:
        results.append(step())
    except Exception as failure:
        error = failure
    reasons = of_all_ranks("" if error is None else str(error) or repr(error))
    if any(reasons):
        named = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        raise WeightUpdateRefused("; ".join(named if len(reasons) > 1 else reasons)) from error
    return results[0]


def of_all_ranks(value: T) -> list[T]:
    """Return the values of all tensor-parallel ranks of the engine, in their order. All of them must call it."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
