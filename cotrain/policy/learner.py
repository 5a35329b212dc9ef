"""The policy learner: one rank's copy of the policy and its GRPO update.

Every rank is given the same rollouts and takes its share. Loss weights are normalised over the whole minibatch, so
the update does not depend on the number of ranks or on the micro-batch size. Ranks find each other as Accelerate
does, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Nothing here draws a random number: no dropout, no shuffling.
"""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object, set_seed
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from cotrain.config.schema import PolicyConfig, RolloutConfig
from cotrain.lossless.draws import Draws
from cotrain.lossless.emitted import response_draws
from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.policy.batching import MicroBatch, micro_batches, share_of_rank, split_minibatches
from cotrain.policy.log_probs import ResponseLogProbs
from cotrain.policy.losses import kl_estimate, loss_denominator, policy_loss
from cotrain.policy.metrics import by_lag, step_metrics
from cotrain.records import Rollout, ScoredRollout, WeightPayload
from cotrain.transport.payload import write_payload
from drafters.base import SamplingParams

LEARNER_STATE = "learner.pt"
"""Optimizer, schedule and version, beside the weights in a checkpoint folder."""


class PolicyLearner:
    """Trains the policy on scored rollouts; one instance per rank."""

    def __init__(
        self,
        config: PolicyConfig,
        rollout: RolloutConfig,
        model_path: str,
        total_steps: int,
        seed: int,
        device: str = "cpu",
    ):
        """Load the policy from model_path and join the other ranks.

        total_steps counts update() calls and sets the length of a cosine schedule. device is "cpu" or "cuda". Raises
        ValueError when the device is not there or the number of ranks is not policy.num_processes.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch sees no GPU; set cluster.device=cpu")
        self._config = config
        self._rollout = rollout
        self.policy_version = 0  # calls of update() behind the current weights
        self._accelerator = Accelerator(
            cpu=device == "cpu",
            mixed_precision="no",  # ResponseLogProbs sets autocast itself, for the frozen reference too
            # A no-grad forward on one rank only must not wait for the others to send their buffers.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        if self._accelerator.num_processes != config.num_processes:
            raise ValueError(
                f"policy.num_processes is {config.num_processes}, but {self._accelerator.num_processes} learner "
                "processes found each other; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
            )
        set_seed(seed)
        self._policy = self._load_model(model_path)
        if config.gradient_checkpointing:
            _enable_gradient_checkpointing(self._policy.model)
        self._reference = None
        if config.kl_coefficient > 0:
            self._reference = self._load_model(model_path).requires_grad_(False)
        optimizer, self._scheduler = build_optimizer(
            self._policy.parameters(), config.optimizer, total_steps * config.minibatches
        )
        self._ddp_policy, self._optimizer = self._accelerator.prepare(self._policy, optimizer)

    def _load_model(self, model_path: str) -> ResponseLogProbs:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(self._accelerator.device)
        return ResponseLogProbs(model.eval(), self._rollout.temperature, getattr(torch, self._config.dtype))

    def update(self, rollouts: list[ScoredRollout]) -> dict[str, float]:
        """Take policy.minibatches optimizer steps on these rollouts, which all ranks must be given alike.

        A step whose advantages are all 0 is still taken, as elsewhere in the field: AdamW's momentum goes on. Returns the
        policy/* metrics of docs/tracking.md, as means over the response tokens of all ranks. Raises ValueError for fewer
        rollouts than ranks, and FloatingPointError for a loss or gradient that is not finite, before the optimizer moves.
        """
        config, num_ranks = self._config, self._accelerator.num_processes
        if len(rollouts) // config.minibatches < num_ranks:
            raise ValueError(
                f"{len(rollouts)} rollouts in {config.minibatches} minibatches leave a learner process of {num_ranks} "
                "without any; lower policy.minibatches or policy.num_processes"
            )
        minibatches = split_minibatches(rollouts, config.minibatches)
        shares = [self._micro_batches(minibatch) for minibatch in minibatches]
        if config.old_log_probs == "recomputed":
            shares = [[self._with_own_log_probs(batch) for batch in share] for share in shares]

        oldest = min(scored.rollout.segments[0].versions.policy for scored in rollouts)
        values: list[dict[str, Tensor]] = []
        steps: list[tuple[float, float, float]] = []
        for minibatch, share in zip(minibatches, shares, strict=True):
            lengths = [len(scored.rollout.token_ids) for scored in minibatch]
            denominator = loss_denominator(config, lengths, self._rollout.max_new_tokens)
            of_share = [self._forward_backward(batch, denominator, last=batch is share[-1]) for batch in share]
            for batch, of_batch in zip(share, of_share, strict=True):
                if steps:  # The gap is that of the policy which the engines served.
                    del of_batch["rollout_log_prob_gap"]
                elif oldest < self.policy_version:
                    of_batch |= by_lag(of_batch, self.policy_version - batch.versions, self.policy_version - oldest)
            steps.append(self._optimizer_step(share, of_share))
            values += of_share
        self.policy_version += 1
        return step_metrics(values, steps, self._accelerator)

    def _micro_batches(self, minibatch: list[ScoredRollout]) -> list[MicroBatch]:
        """Build this rank's micro-batches; those that give no gradient are kept apart and come first."""
        config, accelerator = self._config, self._accelerator
        share = share_of_rank(minibatch, accelerator.process_index, accelerator.num_processes)
        parts = [[s for s in share if s.advantage == 0], [s for s in share if s.advantage != 0]]
        batches = (micro_batches(p, config.micro_batch_tokens, config.batching, accelerator.device) for p in parts)
        return [batch for part in batches for batch in part]

    @torch.no_grad()
    def _with_own_log_probs(self, batch: MicroBatch) -> MicroBatch:
        # The forward pass of a step's only minibatch gives them anyway.
        own = None if self._config.minibatches == 1 else self._log_probs(self._policy, batch)[0]
        return replace(batch, old_log_probs=own)

    @staticmethod
    def _log_probs(model: torch.nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return model(batch.token_ids, batch.position_ids, batch.predictors, batch.targets)

    def _forward_backward(self, batch: MicroBatch, denominator: int, last: bool) -> dict[str, Tensor]:
        """Accumulate the gradient of one micro-batch. Returns values [N] of its tokens: their loss and what is logged."""
        # The last one always runs backward, because DDP's gradient exchange waits for it.
        with_gradient = last or self._reference is not None or bool((batch.advantages != 0).any())
        with contextlib.nullcontext() if last else self._accelerator.no_sync(self._ddp_policy):
            with torch.set_grad_enabled(with_gradient):
                log_probs, entropy = self._log_probs(self._ddp_policy if with_gradient else self._policy, batch)
                with torch.no_grad():
                    reference = None if self._reference is None else self._log_probs(self._reference, batch)[0]
                per_token, values = policy_loss(self._config, denominator, batch, log_probs, reference)
            if with_gradient:
                # DDP averages gradients over the ranks; the loss is already normalised over all of them.
                self._accelerator.backward(per_token.sum() * self._accelerator.num_processes)
        current = log_probs.detach()
        return values | {
            "loss": per_token.detach(),
            "kl": kl_estimate(batch.behaviour_log_probs, current),
            "entropy": entropy,
            "rollout_log_prob_gap": (batch.behaviour_log_probs - current).abs(),
        }

    def _optimizer_step(self, share: list[MicroBatch], values: list[dict[str, Tensor]]) -> tuple[float, float, float]:
        """Step on the gradient of this rank's micro-batches. Returns loss, gradient norm and learning rate of all ranks."""
        losses = [of_batch.pop("loss") for of_batch in values]
        parameters = self._ddp_policy.parameters()
        grad_norm = float(self._accelerator.clip_grad_norm_(parameters, MAX_GRAD_NORM))
        local_loss = torch.tensor(sum(float(tokens.sum()) for tokens in losses), device=self._accelerator.device)
        loss, learning_rate = float(self._accelerator.reduce(local_loss, "sum")), self._scheduler.get_last_lr()[0]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._optimizer.zero_grad()
            broken = [name for batch, tokens in zip(share, losses, strict=True) for name in _broken(batch, tokens)]
            named = ", ".join(gather_object(broken)) or "none: every loss is finite and the gradient overflowed"
            raise FloatingPointError(
                f"policy step {self.policy_version + 1}: loss {loss}, gradient norm {grad_norm}. "
                f"Rollouts (prompt/sample) with a loss that is not finite: {named}. The optimizer has not moved. "
                "If a few rollouts are named, look at their log-probs and rewards; if all are, the weights are already "
                "broken: resume from a checkpoint with a lower policy.optimizer.learning_rate or policy.dtype=float32."
            )
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return loss, grad_norm, float(learning_rate)

    def state_for_serving(self) -> dict[str, Tensor]:
        """Return CPU copies of the weights in Hugging Face names and rollout.dtype, without tied duplicates."""
        model = self._policy.model
        tied = set(model.all_tied_weights_keys)
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        dtype = getattr(torch, self._rollout.dtype)
        return {
            name: tensor.detach().to("cpu", dtype, copy=True)
            for name, tensor in revert_weight_conversion(model, state).items()
        }

    def write_payload(self, path: str | Path) -> WeightPayload:
        """Write the weights for the engines."""
        return write_payload(self.state_for_serving(), path, getattr(torch, self._rollout.dtype))

    @torch.no_grad()
    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return hidden states of T tokens to compare an engine's with: aux [T, A*H], final [T, H], float32 on the CPU.

        Layer id k is Hugging Face's hidden_states[k], the input of decoder layer k; final is after the final norm.
        """
        tokens = torch.tensor([token_ids], device=self._accelerator.device)
        output = self._policy.last_hidden(tokens, output_hidden_states=True)
        final = output.last_hidden_state[0]
        aux = torch.cat([final[:, :0], *(output.hidden_states[layer][0] for layer in layers)], dim=-1)
        return aux.float().cpu(), final.float().cpu()

    def response_draws(self, rollouts: list[Rollout], sampling: SamplingParams, logit_tolerance: float) -> list[Draws]:
        """Return the response tokens of each rollout under the laws of the current weights, in float32."""
        return [
            response_draws(self._policy.model, r.prompt_token_ids, r.token_ids, sampling, None, logit_tolerance)
            for r in rollouts
        ]

    def save(self, folder: str | Path) -> None:
        """Write weights (a Hugging Face folder, float32) and everything an exact resume needs; call on every rank."""
        if self._accelerator.is_main_process:
            self._policy.model.save_pretrained(folder)
            parts = {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}
            torch.save({"policy_version": self.policy_version, **parts}, Path(folder) / LEARNER_STATE)
        self._accelerator.wait_for_everyone()

    def load(self, folder: str | Path) -> None:
        """Continue from a folder written by save(); call on every rank. The reference stays the initial policy."""
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._policy.model.load_state_dict(saved.state_dict())
        state = torch.load(Path(folder) / LEARNER_STATE, map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self.policy_version = state["policy_version"]

    def close(self) -> None:
        """Leave the process group, once all ranks are done with it."""
        self._accelerator.wait_for_everyone()
        self._accelerator.end_training()


def _broken(batch: MicroBatch, losses: Tensor) -> list[str]:
    """Name the rollouts of a micro-batch whose tokens' losses [N] are not all finite."""
    rollouts = [batch.rollouts[index].rollout for index in batch.sequence_ids[~losses.isfinite()].unique()]
    return [f"{rollout.prompt_id}/{rollout.sample_index}" for rollout in rollouts]


def _enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """transformers recomputes only layers in training mode; set it on those alone, so that dropout stays off."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
