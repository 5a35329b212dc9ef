"""One drafter, its optimizer and the target weights that teach it: batches of features in, better weights out.

It shares no weight, optimizer or random state with the policy learner.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.process.failures import RunFailure
from cotrain.trainer.buffer import TrainingBatch, batches_of
from cotrain.trainer.spec import TrainerSpec
from cotrain.transport.features import FeatureRecord
from drafters.acceptance import RolloutAcceptance, StartAcceptance, rollout_acceptances
from drafters.alignment import DraftBatch
from drafters.base import Drafter, TargetSpec, TargetWeights
from drafters.build import build_drafter, load_drafter
from drafters.files import read_config, weight_files
from drafters.losses import acceptances, drafter_loss

EXPECTED = "drafter/expected_acceptance_length"
OPTIMIZER_STATE = "optimizer.pt"

PROMPT_TOKEN_WEIGHT = 0.1
"""Weight of a prompt token when the draft vocabulary is chosen: only response tokens are ever drafted, but the words
of a prompt tend to come back in its response."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGE_BLOCK = 4 * 2**20
"""Blocks of at least this many bytes go back to the system when they are freed."""


class TrainingDiverged(RunFailure, FloatingPointError):
    """A loss, gradient or weight of the drafter is not finite."""


class Distiller:
    """Trains and scores one drafter in float32."""

    def __init__(
        self, spec: TrainerSpec, model_path: str | Path, init_folder: str | Path | None, device: str = "cpu"
    ) -> None:
        """Build a new drafter, or load it from init_folder.

        model_path is the target's folder; only drafters that start with its weights read them. device: "cpu" or
        "cuda". Raises ValueError when drafter, target and settings do not fit each other.
        """
        if device == "cpu":
            return_freed_blocks()
        self._config, self._device = spec.drafter, device
        self.serving_dtype: torch.dtype = getattr(torch, spec.serving_dtype)
        self._target = TargetSpec.from_pretrained(model_path)
        if init_folder is None:
            drafter = build_drafter(self._config.model, self._target, spec.seed)
            drafter.start_from(model_path)
        else:
            drafter = load_drafter(init_folder, self._target, spec.num_positions, self._config.model)
        self.drafter: Drafter = drafter.to(device)
        self._served_depth = min(spec.num_speculative_tokens, drafter.shape.trained_depth)
        self._optimizer, self._scheduler = build_optimizer(
            self.drafter.parameters(), self._config.optimizer, spec.total_updates
        )
        self._target_weights: dict[int, TargetWeights] = {}

    def serve_as(self, dtype: str) -> None:
        """Write drafters for the engines in this number format of torch from now on."""
        self.serving_dtype = getattr(torch, dtype)

    def set_target_weights(self, payload_path: str | Path, policy_version: int) -> None:
        """Read embedding and head of a policy version from a safetensors file in Hugging Face names, or a model folder.

        Call it before the features of that version are used.
        """
        weights = read_target_weights(payload_path, policy_version, self._target, self._device)
        self._target_weights[policy_version] = weights

    def choose_vocabulary(self, rollouts: Iterable[tuple[Tensor, Tensor]], policy_version: int) -> float:
        """Pick the draft vocabulary from (prompt, response) tokens, each [T] int64, before the first update.

        Returns the share of the counted tokens that it covers.
        """
        counts = torch.zeros(self._target.vocab_size, dtype=torch.float64)
        for prompt, response in rollouts:
            counts += response.bincount(minlength=len(counts))
            counts += PROMPT_TOKEN_WEIGHT * prompt.bincount(minlength=len(counts))
        return self.drafter.choose_vocabulary(counts, self._target_weights[policy_version])

    def update(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Take one optimizer step on a batch.

        Metrics: loss (weighted, and per draft position), grad_norm (before clipping), learning_rate, num_tokens. Raises
        TrainingDiverged, before the weights change, when a loss or gradient is not finite.
        """
        rows, sampling = batch
        target = self._target_weights[rows.policy_version]
        loss, per_position = drafter_loss(self.drafter, self._on_device(rows), target, sampling, self._config.objective)
        self._optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
        metrics = {
            "loss": float(loss.detach()),
            "grad_norm": float(grad_norm),
            "learning_rate": float(self._scheduler.get_last_lr()[0]),
            "num_tokens": float(len(rows.token_ids)),
        }
        if not (loss.isfinite() and grad_norm.isfinite()):
            raise TrainingDiverged(
                f"drafter training in step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} on "
                f"{int(rows.document_ids[-1]) + 1} rollouts of policy version {rows.policy_version}. "
                f"{self._cause(target)}. The optimizer has not moved"
            )
        self._optimizer.step()
        self._scheduler.step()
        return metrics | {f"loss_pos_{k}": value for k, value in enumerate(per_position.tolist(), start=1)}

    def evaluate(self, records: Sequence[FeatureRecord]) -> dict[str, float]:
        """Return the expected acceptance of the current weights; empty when every rollout is too short or has holes.

        It is what the engine would count on these rollouts (drafters/acceptance.py): the rate of position k is the share
        of verification steps that accept draft tokens 1 to k, and the length is 1 + the sum of the rates.
        """
        rates = self.score([self.drafter], records)[0][-1].rates()
        if not rates:
            return {}
        metrics = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
        return metrics | {EXPECTED: 1.0 + sum(rates)}

    def score(self, drafters: Sequence[Drafter], records: Sequence[FeatureRecord]) -> list[list[RolloutAcceptance]]:
        """Return, for each drafter, what each rollout adds to its acceptance length at draft lengths 1 to K, as K elements."""
        return [rollout_acceptances(of_drafter, self._served_depth) for of_drafter in self._starts(drafters, records)]

    def _starts(self, drafters: Sequence[Drafter], records: Sequence[FeatureRecord]) -> list[list[StartAcceptance]]:
        """Return, for each drafter, the acceptance at the starts of these rollouts, by batch."""
        parts, objective = [], self._config.objective
        for rows, sampling in batches_of(records, self._config.batch_tokens):
            target = self._target_weights[rows.policy_version]
            parts.append(acceptances(drafters, self._on_device(rows), target, sampling, objective))
        return [[part[i] for part in parts] for i in range(len(drafters))]

    def check_publishable(self, version: int, drafter: Drafter) -> None:
        """Raise TrainingDiverged when a weight is not finite, or so large that numbers in an engine could overflow."""
        if problems := drafter.overflowing():
            raise TrainingDiverged(
                f"drafter version {version} is not published, an engine would compute with {'; '.join(problems)}: "
                "lower drafter.optimizer.learning_rate"
            )

    def save(self, folder: str | Path) -> None:
        """Write drafter and optimizer. Features and target weights are not written and must be handed over again."""
        self.drafter.save(folder, torch.float32)
        state = {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}
        torch.save(state, Path(folder) / OPTIMIZER_STATE)

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by `save`. Raises ValueError when its drafter does not fit this one."""
        self.drafter.load(folder)
        state = torch.load(Path(folder) / OPTIMIZER_STATE, map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])

    def _on_device(self, batch: DraftBatch) -> DraftBatch:
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "policy_version"}
        return replace(batch, **{name: tensor.to(self._device) for name, tensor in tensors.items()})

    def _cause(self, target: TargetWeights) -> str:
        """Say what is not finite, or else what to change."""
        causes = self.drafter.overflowing()
        for name, matrix in (("embedding", target.embedding), ("head", target.head)):
            if not matrix.isfinite().all():
                causes.append(f"the target's {name} of policy version {target.policy_version} is not finite")
        return "; ".join(causes) or "All weights are finite: lower drafter.optimizer.learning_rate"


def return_freed_blocks() -> bool:
    """Return freed blocks of LARGE_BLOCK bytes or more to the system. False if the C library has no such setting.

    By itself, glibc raises this limit to up to 32 MiB. A drafter's step frees blocks of many sizes below that, between
    others that stay, and a fifth of its peak memory was holes (benchmarks/drafter_memory.py: 3.2 instead of 2.6 GiB).
    The setting costs up to 5 % of the step's time in page faults. It does not concern tensors on a GPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(p, LARGE_BLOCK) for p in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def read_target_weights(
    path: str | Path, policy_version: int, target: TargetSpec, device: str | torch.device
) -> TargetWeights:
    """Read embedding and head, and nothing else, from a safetensors file in Hugging Face names, or from a model folder.

    Without an lm_head, the target is tied and its head is the embedding. Both are copies: the file may be overwritten.
    Raises ValueError when a file is unreadable, has no embedding, or is of another target.
    """
    path = Path(path)
    # The head in the folder of a tied model is a leftover copy, which no engine loads.
    tied = path.is_dir() and read_config(path).get("tie_word_embeddings")
    found: dict[str, Tensor] = {}
    try:
        for part in weight_files(path) if path.is_dir() else [path]:
            with safe_open(part, framework="pt") as file:
                wanted = (name for name in file.keys() if name.endswith(EMBEDDING if tied else (EMBEDDING, HEAD)))  # noqa: SIM118
                found |= {name: file.get_tensor(name).to(device, copy=True) for name in wanted}
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"target weights {path} cannot be read: {error}") from error
    embeddings, heads = ([name for name in found if name.endswith(suffix)] for suffix in (EMBEDDING, HEAD))
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(f"{path} has {embeddings} and {heads}; expected one embedding, at most one head")
    expected = (target.vocab_size, target.hidden_size)
    for name, matrix in found.items():
        if tuple(matrix.shape) != expected:
            raise ValueError(f"{name} in {path} is {tuple(matrix.shape)}, the target's is {expected}")
    return TargetWeights(found[embeddings[0]], found[[*heads, *embeddings][0]], policy_version)
