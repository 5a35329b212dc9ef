"""The contract every drafter keeps, and the tensors that go in and come out of it.

Shape letters: N packed tokens, A aux layers, H target hidden size, V target vocabulary, K draft positions.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.acceptance import StartAcceptance
from drafters.alignment import Alignment, DraftBatch
from drafters.config import ObjectiveConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: how many there are, how many a token goes through, and how wide they are."""

    number: int
    per_token: int
    size: int
    shared_size: int  # of the expert that all tokens go through
    normed: bool  # the weights of the chosen experts sum to 1


@dataclass(frozen=True)
class TargetSpec:
    """Facts about the target model that a drafter is built for."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()  # always in the draft vocabulary
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that is rotated
    experts: Experts | None = None  # of layer 0, where they stand for the MLP

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "TargetSpec":
        """Read from a model folder's config.json. Raises ValueError naming the field that is missing."""
        config = read_config(folder)

        def required(name: str) -> Any:
            if config.get(name) is None:
                raise ValueError(f"{folder}/config.json has no {name}; a drafter needs a Llama-style target")
            return config[name]

        heads = required("num_attention_heads")
        eos = config.get("eos_token_id")
        rope = rope_parameters(config)
        return cls(
            model_type=required("model_type"),
            vocab_size=required("vocab_size"),
            hidden_size=required("hidden_size"),
            num_layers=required("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or required("hidden_size") // heads,
            intermediate_size=required("intermediate_size"),
            rms_norm_eps=required("rms_norm_eps"),
            rope_theta=rope.get("rope_theta") or required("rope_theta"),
            max_position_embeddings=required("max_position_embeddings"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            rope_type=rope.get("rope_type", rope.get("type", "default")),
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
            experts=_experts(config),
        )


def _experts(config: dict[str, Any]) -> Experts | None:
    sparse = config.get("num_experts") and config.get("decoder_sparse_step", 1) == 1
    if not sparse or 0 in (config.get("mlp_only_layers") or ()):
        return None
    return Experts(
        number=config["num_experts"],
        per_token=config.get("num_experts_per_tok", 1),
        size=config.get("moe_intermediate_size", 0),
        shared_size=config.get("shared_expert_intermediate_size", 0),
        normed=config.get("norm_topk_prob", True),
    )


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Facts about rotary positions in a config.json, under any of the names they have had.

    transformers 5 nests all of them; older configs keep rope_theta and partial_rotary_factor at the top level.
    """
    found = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    for field in ("rope_scaling", "rope_parameters"):
        found |= config.get(field) or {}
    return found


@dataclass(frozen=True)
class TargetWeights:
    """The two matrices a drafter borrows from the target, of one policy version. Never trained, never saved."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H], the target's full lm_head (the embedding again when tied)
    policy_version: int


@dataclass(frozen=True)
class Sampler:
    """How the engine samples; the drafter is trained and scored against this processed distribution."""

    temperature: float
    top_p: float
    top_k: int
    draft_sample_method: str  # "greedy" | "probabilistic"


@dataclass(frozen=True)
class DraftLoss:
    """Result of one pass over a batch; all of it is about the supervised positions only."""

    loss: Tensor  # scalar, differentiable
    per_position: Tensor  # [K] detached: loss of each draft position
    acceptance: StartAcceptance  # detached: of every start, from which acceptance lengths are estimated
    num_tokens: int  # supervised start positions


@dataclass(frozen=True)
class Drafts:
    """What a drafter makes of a batch, before its head: K draft positions, S starts."""

    hidden: Sequence[Tensor]  # K tensors [S, H] that the head reads
    head: Tensor  # [V_draft, H]
    draft_to_target: Tensor  # [V_draft] target ids of the head's rows, ascending
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Serving:
    """What an engine must know of a drafter before it loads the drafter's folder."""

    method: str  # vLLM's name for this kind of speculation
    aux_layers: tuple[int, ...] = ()  # target layers read, ascending; the final hidden state is read in any case
    target_overrides: tuple[tuple[str, object], ...] = ()  # fields of the target's config that the drafter's code reads


class Drafter(nn.Module, ABC):
    """A trainable drafter for one target. Parameters and buffers are exactly what is saved."""

    @abstractmethod
    def __init__(self, shape: Any) -> None:
        """shape: everything that fixes the tensors; a frozen dataclass with trained_depth and max_position_embeddings."""
        super().__init__()
        self.shape = shape

    @classmethod
    def from_config(cls, config: Any, target: TargetSpec, seed: int) -> Self:
        """A new drafter in float32 with random weights. Raises ValueError when it cannot fit the target."""
        # Without memory first, so that torch's own initialisation neither costs time nor moves the global seed.
        with torch.device("meta"):
            drafter = cls(cls.shape_of(config, target))
        drafter.to_empty(device="cpu")
        drafter.initialise(torch.Generator().manual_seed(seed))
        return drafter

    @classmethod
    def from_checkpoint(cls, folder: str | Path, target: TargetSpec, depth_if_unstated: int | None = None) -> Self:
        """The drafter of a folder, in float32. Raises ValueError when it is broken or for another target.

        depth_if_unstated: draft positions trained, for a checkpoint that does not say.
        """
        shape, tensors = cls.read(folder, target, depth_if_unstated)
        with torch.device("meta"):
            drafter = cls(shape)
        drafter.check_tensors(tensors, folder)
        drafter.load_state_dict(tensors, assign=True)
        drafter = drafter.float()
        if problems := drafter.overflowing():
            raise ValueError(f"{folder} has weights that no engine can serve: {'; '.join(problems)}")
        return drafter

    @classmethod
    @abstractmethod
    def shape_of(cls, config: Any, target: TargetSpec) -> Any:
        """Shape of a new drafter. Raises ValueError with all `shape_problems`."""

    @classmethod
    @abstractmethod
    def read(
        cls, folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Shape and tensors of a checkpoint folder; arguments and errors as of `from_checkpoint`."""

    @abstractmethod
    def initialise(self, generator: torch.Generator) -> None:
        """Fill parameters and buffers that hold no numbers yet, the same for the same generator."""

    @classmethod
    @abstractmethod
    def shape_problems(cls, config: Any, target: TargetSpec) -> list[str]:
        """Why a configuration does not fit the target, by field; empty when it does."""

    @property
    @abstractmethod
    def serving(self) -> Serving:
        """How an engine serves it. aux_layers: id k = Hugging Face hidden_states[k]."""

    @property
    def trained_depth(self) -> int:
        """Draft positions unrolled in training."""
        depth: int = self.shape.trained_depth
        return depth

    @property
    def max_positions(self) -> int:
        """Tokens of prompt, response and draft together beyond which an engine does not draft."""
        positions: int = self.shape.max_position_embeddings
        return positions

    @property
    @abstractmethod
    def draft_to_target(self) -> Tensor:
        """Target token ids [V_draft] that it can propose, ascending."""

    @abstractmethod
    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> Drafts:
        """Unroll to trained_depth from every start."""

    @abstractmethod
    def loss(self, batch: DraftBatch, target: TargetWeights, sampler: Sampler, objective: ObjectiveConfig) -> DraftLoss:
        """Unroll to trained_depth and compare each position with the target's processed distribution."""

    @abstractmethod
    def choose_vocabulary(self, token_counts: Tensor, target: TargetWeights) -> float:
        """Pick the draft vocabulary from counts [V] and take over from the target what begins as the target's.

        Only before the first optimizer step. Returns the share of counted tokens that is covered.
        """

    @abstractmethod
    def state_for_serving(self) -> dict[str, Tensor]:
        """Exactly the tensors an engine loads, in checkpoint names; never the embedding or the target's head."""

    @abstractmethod
    def overflowing(self) -> list[str]:
        """What is too large for an engine, or no number, whatever it reads; empty for a drafter that can be served.

        Finite weights are not enough: keys and values that overflow stay in the engine's KV cache.
        """

    @abstractmethod
    def serving_config(self) -> dict[str, object]:
        """Contents of config.json of a checkpoint folder."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """What the fields of its configuration (drafter.model) are for this drafter."""

    def save(self, folder: str | Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors; stock vLLM serves the folder as it is.

        Whatever ends the process, and when: afterwards the folder holds this drafter, or the one it held before, or
        none that can be loaded (no config.json). Never half of one. Raises OSError when the disk is full.
        """
        state = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in self.state_dict().items()
        }
        config = {**self.serving_config(), "torch_dtype": str(dtype).removeprefix("torch.")}
        _write_folder(Path(folder), state, json.dumps(config, indent=2) + "\n")

    def load(self, folder: str | Path) -> None:
        """Replace the weights of this drafter by those of a folder written by `save`; dtype and device stay.

        Raises ValueError for a truncated file and for missing, extra or wrong-shape tensors; weights are then as before.
        """
        tensors = read_tensors(folder)
        self.check_tensors(tensors, folder)
        self.load_state_dict(tensors)

    def check_tensors(self, tensors: dict[str, Tensor], source: str | Path) -> None:
        """Raise one ValueError that lists every tensor that is missing, unexpected or of the wrong shape."""
        expected = {name: tensor.shape for name, tensor in self.state_dict().items()}
        problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
        problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
        problems += [
            f"{name} is {list(tensors[name].shape)}, expected {list(expected[name])}"
            for name in sorted(expected.keys() & tensors.keys())
            if tensors[name].shape != expected[name]
        ]
        if problems:
            raise ValueError(f"{source} does not fit this drafter: " + "; ".join(problems))


def _write_folder(folder: Path, state: dict[str, Tensor], config: str) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        try:
            save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors' own type for a full disk too
            raise OSError(f"cannot write {folder / WEIGHTS}: {error}") from error
        (partial / CONFIG).write_text(config)
        for path in (partial / WEIGHTS, partial / CONFIG, partial):
            _flush(path)
        if not folder.is_dir() or not any(folder.iterdir()):
            os.replace(partial, folder)
        else:
            # A folder in use cannot be exchanged in one move: it is no drafter until the new config.json is there.
            (folder / CONFIG).unlink(missing_ok=True)
            os.replace(partial / WEIGHTS, folder / WEIGHTS)
            os.replace(partial / CONFIG, folder / CONFIG)
            _flush(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have a file or a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError when there is none or it is not a JSON object."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a model folder")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return config


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder's model.safetensors. Raises ValueError when it is missing, truncated or corrupt."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{path} does not exist; drafter weights are read from {WEIGHTS}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt: {error}") from error
