"""The interface that every drafter implements, and the tensors that go in and come out.

Shape letters: N packed tokens, A aux layers, H target hidden size, V target vocabulary, K draft positions, S starts.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.alignment import Alignment, DraftBatch
from drafters.files import CONFIG, WEIGHTS, flush, open_to_readers, weight_files, write_json
from drafters.target import Experts as Experts
from drafters.target import TargetSpec as TargetSpec
from drafters.unroll import ZeroCentredRMSNorm

LARGEST_WEIGHT = 1e4
"""Largest absolute weight W with which a drafter is served. Keys and values that overflow stay in the engine's KV cache and
also spoil drafting with the next drafter, even if that one is sound. The input of every projection has passed an RMSNorm of
gain at most W. For hidden size H, its outputs are therefore at most H W^2, and those of an MLP of width I at most I H^2 W^5.
With H = 16,384 and I = 65,536 that is 2e33, which bfloat16 and float32 (up to 3e38) hold whatever the drafter reads."""

TRAINED_DEPTH = "trained_draft_positions"
"""Field of config.json that holds the number of draft positions unrolled in training."""


@dataclass(frozen=True)
class TargetWeights:
    """The two matrices that a drafter borrows from the target, at one policy version. It neither trains nor saves them."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H], the target's full lm_head (the embedding again when tied)
    policy_version: int


@dataclass(frozen=True, order=True)
class SamplingParams:
    """How the engine samples. The drafter is trained and scored against the distribution that these settings give."""

    temperature: float
    top_p: float
    top_k: int
    draft_sample_method: str  # "greedy" | "probabilistic"


@dataclass(frozen=True)
class ServingSpec:
    """What an engine must know about a drafter before it loads the drafter's folder."""

    method: str  # vLLM's name for this kind of speculation
    aux_layers: tuple[int, ...] = ()  # target layers read, ascending; id k = Hugging Face hidden_states[k]
    target_overrides: tuple[tuple[str, object], ...] = ()  # set in the target's config, where vLLM's drafter reads them


@dataclass(frozen=True)
class Shape:
    """Everything that fixes a drafter's tensors and its maths; config.json carries the same facts."""

    sizes: TargetSpec  # of the drafter's layer; vocabulary and hidden size are the target's
    trained_depth: int  # draft positions unrolled in training


class Drafter(nn.Module, ABC):
    """A trainable drafter for one target. Parameters and buffers are exactly what is saved."""

    shape: Shape
    serving: ServingSpec
    drafts_follow_length: bool = False
    """Does a draft token depend on how many there are?"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @staticmethod
    @abstractmethod
    def shape_of(config: Any, target: TargetSpec) -> Shape:
        """Return the shape of a new drafter. Raises ValueError naming the field that does not fit the target."""

    @staticmethod
    @abstractmethod
    def read(folder: str | Path, target: TargetSpec, depth_if_unstated: int | None) -> tuple[Shape, dict[str, Tensor]]:
        """Return shape and tensors of a checkpoint folder. Raises ValueError when it is broken or made for another target.

        depth_if_unstated: trained depth to assume where the checkpoint does not state it; None if it is unknown.
        """

    @staticmethod
    @abstractmethod
    def to_config(shape: Any) -> dict[str, object]:
        """Return the contents of config.json for a checkpoint of this shape."""

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fill the parameters: matrices from Normal(0, 0.02) as in Llama, biases 0, norms of gain 1. Subclasses fill buffers."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                else:
                    parameter.fill_(float(name == "weight" and not isinstance(module, ZeroCentredRMSNorm)))

    def start_from(self, policy: str | Path) -> None:
        """Copy the first weights of a new drafter from the policy's folder; by default, nothing is copied.

        Raises ValueError when the folder's weights do not fit.
        """

    @property
    def draft_to_target(self) -> Tensor:
        """Return the target token ids [V_draft] that this drafter can propose, ascending; all of them unless overridden."""
        return torch.arange(self.shape.sizes.vocab_size, device=next(self.parameters()).device)

    @abstractmethod
    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[Sequence[Tensor], Tensor]:
        """Run the drafter from every start over all draft positions of the alignment.

        Returns the states that the head reads, one tensor [S, H] for each of K positions, and the head [V_draft, H].
        """

    def own_loss(self, states: Sequence[Tensor], accepted: Tensor) -> Tensor | None:
        """Return the loss of what a drafter learns beside its drafts, from what `drafts` returned; by default None.

        accepted [K, S]: acceptance probability of each draft token, NaN where it is not supervised.
        """
        return None

    def choose_vocabulary(self, token_counts: Tensor, target: TargetWeights) -> float:
        """Choose the draft vocabulary from token counts [V], and copy the weights that start as the target's.

        Call it only before the first optimizer step. Returns the share of the counted tokens that the vocabulary covers.
        """
        return 1.0

    def start_training(self, batch: DraftBatch, target: TargetWeights, is_new: bool) -> None:
        """Prepare for the first optimizer step by its batch; by default nothing. is_new: nobody has trained this drafter before."""

    def state_for_serving(self) -> dict[str, Tensor]:
        """Return exactly the tensors an engine loads, under their checkpoint names; never the target's embedding or head."""
        return self.state_dict()

    def saved_state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that stock vLLM serves; by default what an engine loads."""
        return self.state_for_serving()

    def overflowing(self) -> list[str]:
        """List the tensors that are not finite or, if all are, those with a weight above LARGEST_WEIGHT; usually empty."""
        largest = {name: float(t.abs().max()) for name, t in self.saved_state().items() if t.is_floating_point()}
        if broken := [f"{name} is not finite" for name, value in largest.items() if not math.isfinite(value)]:
            return broken
        return [f"values too large with {name} up to {v:.1g}" for name, v in largest.items() if v > LARGEST_WEIGHT]

    def save(self, folder: str | Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors; stock vLLM serves the folder as it is.

        If the process dies midway, the folder holds this drafter, the one it held before, or none that can be loaded
        (no config.json). Raises OSError when the disk is full.
        """
        folder = Path(folder)
        state = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in self.saved_state().items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{WEIGHTS}.partial"
        try:
            save_tensors(state, partial)
            flush(partial)
            (folder / CONFIG).unlink(missing_ok=True)
            os.replace(partial, folder / WEIGHTS)
        except SafetensorError as error:  # safetensors raises its own type for a full disk too
            raise OSError(f"cannot write {folder / WEIGHTS}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        write_json(folder / CONFIG, self.to_config(self.shape) | {"torch_dtype": str(dtype).removeprefix("torch.")})
        flush(folder)
        flush(folder.parent)

    def load_tensors(self, tensors: dict[str, Tensor], source: str | Path, assign: bool = False) -> None:
        """Load a state dict. Raises one ValueError that lists every tensor that is missing, unexpected or of the wrong shape."""
        try:
            self.load_state_dict(tensors, assign=assign)
        except RuntimeError as error:
            raise ValueError(f"{source} does not fit this drafter: {error}") from error


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file of PyTorch tensors, which others may read as far as the umask says."""
    save_file(tensors, path, metadata={"format": "pt"})
    open_to_readers(path)


def model_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model folder, mapped from its files. Raises ValueError naming what is missing."""
    for file in weight_files(folder):
        yield from load_file(file).items()


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Read all tensors of model.safetensors. Raises ValueError when it is missing, truncated or corrupt."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{path} does not exist; drafter weights are read from {WEIGHTS}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt: {error}") from error
