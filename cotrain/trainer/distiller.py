"""One drafter, its optimizer and the heads that teach it: batches of features in, better weights out.

It shares no weight, optimizer or random state with the policy learner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from cotrain.config.schema import RunConfig
from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.process.failures import RunFailure
from cotrain.trainer.buffer import batches_of
from cotrain.trainer.host_memory import return_freed_blocks
from cotrain.trainer.target_weights import read_target_weights
from cotrain.transport.features import FeatureRecord
from drafters.acceptance import RolloutAcceptance, acceptance_rates, rollout_acceptances
from drafters.alignment import DraftBatch
from drafters.base import Drafter, DraftLoss, SamplingParams, TargetSpec, TargetWeights
from drafters.build import build_drafter, load_drafter
from drafters.losses import acceptances, drafter_loss

OPTIMIZER_STATE = "optimizer.pt"

PROMPT_TOKEN_WEIGHT = 0.1
"""What a prompt token counts when the draft vocabulary is chosen: only response tokens are ever drafted, but the words
of a prompt tend to come back in its response."""


class TrainingDiverged(RunFailure, FloatingPointError):
    """A loss, gradient or weight of the drafter is not finite."""


class Distiller:
    """Trains and scores one drafter in float32."""

    def __init__(
        self,
        config: RunConfig,
        model_path: str | Path,
        init_folder: str | Path | None,
        total_updates: int,
        device: str = "cpu",
    ):
        """Build the drafter of a run, or load it from init_folder.

        model_path is the target's folder; only its config.json is read. total_updates sets the length of a cosine
        schedule. device: "cpu" or "cuda". Raises ValueError when drafter, target and configuration do not fit each other.
        """
        assert config.drafter is not None
        rollout = config.rollout
        if device == "cpu":
            return_freed_blocks()
        self._config, self._device = config.drafter, device
        self._target = TargetSpec.from_pretrained(model_path)
        if init_folder is None:
            drafter = build_drafter(self._config.model, self._target, config.seed)
        else:
            drafter = load_drafter(init_folder, self._target, rollout.num_positions, self._config.model)
        self.drafter: Drafter = drafter.to(device)
        self._served_depth = min(rollout.num_speculative_tokens, drafter.trained_depth)
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self._optimizer, self._scheduler = build_optimizer(
            self.drafter.parameters(), self._config.optimizer, total_updates
        )
        self._target_weights: dict[int, TargetWeights] = {}

    def set_target_weights(self, payload_path: str, policy_version: int) -> None:
        """Take embedding and head of a policy version from a safetensors file in Hugging Face names.

        Must come before the features of that version.
        """
        weights = read_target_weights(payload_path, policy_version, self._target, self._device)
        self._target_weights[policy_version] = weights

    def choose_vocabulary(self, token_counts: Tensor, policy_version: int) -> float:
        """Pick the draft vocabulary from counts [V], before the first update; the share of them that it covers."""
        return self.drafter.choose_vocabulary(token_counts, self._target_weights[policy_version])

    def update(self, batch: DraftBatch, step: int) -> dict[str, float]:
        """One optimizer step on a batch.

        Metrics: loss (weighted, and per draft position), grad_norm (before clipping), learning_rate, num_tokens. Raises
        TrainingDiverged before the optimizer moves when a loss or gradient is not finite.
        """
        result = self._loss(batch)
        loss = float(result.loss.detach())
        if not result.loss.isfinite():
            raise TrainingDiverged(self._diverged(step, f"loss {loss}", batch))
        self._optimizer.zero_grad()
        result.loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
        if not grad_norm.isfinite():
            self._optimizer.zero_grad()
            raise TrainingDiverged(self._diverged(step, f"gradient norm {float(grad_norm)}", batch))
        metrics = {
            "loss": loss,
            "grad_norm": float(grad_norm),
            "learning_rate": float(self._scheduler.get_last_lr()[0]),
            "num_tokens": float(len(batch.token_ids)),
        }
        metrics |= {f"loss_pos_{k}": value for k, value in enumerate(result.per_position.tolist(), start=1)}
        self._optimizer.step()
        self._scheduler.step()
        return metrics

    @torch.no_grad()
    def evaluate(self, records: Sequence[FeatureRecord]) -> dict[str, float]:
        """Expected acceptance of the current weights on rollouts; empty when none is long enough.

        As the engine would count it on these rollouts: rate of position k = share of verification steps that accept
        draft tokens 1 to k, length = 1 + sum of the rates, for the draft tokens served (see drafters/acceptance.py).
        """
        batches = batches_of(records, self._config.batch_tokens)
        rates = acceptance_rates([self._loss(batch).acceptance for batch in batches], self._served_depth)
        if not rates:
            return {}
        metrics = {f"drafter/acceptance_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
        return metrics | {"drafter/expected_acceptance_length": 1.0 + sum(rates)}

    @torch.no_grad()
    def score(self, drafters: Sequence[Drafter], records: Sequence[FeatureRecord]) -> list[list[RolloutAcceptance]]:
        """[K] for each drafter: what each rollout adds to its acceptance length at draft lengths 1 to K."""
        parts = []
        for batch in batches_of(records, self._config.batch_tokens):
            target = self._target_weights[batch.policy_version]
            objective = self._config.objective
            parts.append(acceptances(drafters, self._on_device(batch), target, self._sampling, objective))
        return [rollout_acceptances([p[i] for p in parts], self._served_depth) for i in range(len(drafters))]

    def check_publishable(self, version: int) -> None:
        """Raise TrainingDiverged when a weight is not finite, or so large that an engine's numbers would not be."""
        problem = self._non_finite_parameters()
        if not problem and (too_large := self.drafter.overflowing()):
            problem = f"an engine would compute {'; '.join(too_large)}: lower drafter.optimizer.learning_rate"
        if problem:
            raise TrainingDiverged(f"drafter version {version} is not published: {problem}")

    def save_without_features(self, folder: str | Path) -> None:
        """Write drafter and optimizer, for somebody who can hand over features and target weights again."""
        self.drafter.save(folder, torch.float32)
        state = {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}
        torch.save(state, Path(folder) / OPTIMIZER_STATE)

    def load_without_features(self, folder: str | Path) -> None:
        """Continue from a folder written by `save_without_features`."""
        self.drafter.load(folder)
        state = torch.load(Path(folder) / OPTIMIZER_STATE, map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])

    def _loss(self, batch: DraftBatch) -> DraftLoss:
        target = self._target_weights[batch.policy_version]
        return drafter_loss(self.drafter, self._on_device(batch), target, self._sampling, self._config.objective)

    def _on_device(self, batch: DraftBatch) -> DraftBatch:
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "policy_version"}
        return replace(batch, **{name: tensor.to(self._device) for name, tensor in tensors.items()})

    def _non_finite_parameters(self) -> str:
        names = [name for name, parameter in self.drafter.named_parameters() if not parameter.isfinite().all()]
        return f"not finite in the drafter: {', '.join(names)}" if names else ""

    def _diverged(self, step: int, what: str, batch: DraftBatch) -> str:
        target = self._target_weights[batch.policy_version]
        causes = [self._non_finite_parameters()]
        for name, matrix in (("embedding", target.embedding), ("head", target.head)):
            if not matrix.isfinite().all():
                causes.append(f"not finite in the target of policy version {batch.policy_version}: {name}")
        found = "; ".join(filter(None, causes)) or "all weights are finite: lower drafter.optimizer.learning_rate"
        return (
            f"drafter training in step {step}: {what} on {int(batch.document_ids[-1]) + 1} rollouts of policy version "
            f"{batch.policy_version}. {found}. The optimizer has not moved"
        )


def vocabulary_counts(rollouts: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """Weighted counts [V] of the tokens of (prompt, response) pairs, each [T] int64, to choose a draft vocabulary."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for prompt, response in rollouts:
        counts += response.bincount(minlength=vocab_size)
        counts += PROMPT_TOKEN_WEIGHT * prompt.bincount(minlength=vocab_size)
    return counts
