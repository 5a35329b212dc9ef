"""The policy learner: one rank's copy of the policy, or its part under FSDP2, and its GRPO update.

Every public method is collective: all ranks call it, with the same arguments. In an update, each rank trains on its share of
the rollouts. Loss weights are normalised over the whole minibatch, so the update does not depend on the number of ranks or on
the micro-batch size. Ranks find each other as in any Accelerate program, through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Nothing here draws a random number: there is no dropout and no shuffling.
"""

import contextlib
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from cotrain.config.schema import LoraConfig, PolicyConfig, RolloutConfig
from cotrain.lossless.emitted import Draws, response_draws
from cotrain.optimizer import MAX_GRAD_NORM, build_optimizer
from cotrain.policy import adapters, sharding
from cotrain.policy.batching import MicroBatch, empty_micro_batch, micro_batches, share_of_rank, split_minibatches
from cotrain.policy.log_probs import ResponseLogProbs
from cotrain.policy.losses import by_lag, kl_estimate, loss_denominator, policy_loss, step_metrics
from cotrain.policy.shared_prompts import can_share
from cotrain.process.cluster import free_port
from cotrain.records import Rollout, ScoredRollout, WeightPayload
from cotrain.weights.digests import DigestedFile
from cotrain.weights.payload import save_tensors, write_tensors
from drafters.base import SamplingParams
from drafters.files import CONFIG, GENERATION_CONFIG, WEIGHTS

if TYPE_CHECKING:  # transformers' models take seconds to import, also in the controller, which only calls this class
    from transformers import PreTrainedModel

LEARNER_STATE = "learner.pt"
"""File of the learning-rate schedule and the policy version, beside the weights in a checkpoint folder."""

COMPARED_EVERY = 16
"""When weights are sent without a file, each update compares one in so many tensors; that many updates compare them all."""


class PolicyLearner:
    """Trains the policy on scored rollouts; one instance per rank."""

    def __init__(
        self,
        config: PolicyConfig,
        rollout: RolloutConfig,
        model_path: str,
        total_steps: int,
        device: str = "cpu",
        seed: int = 0,
    ):
        """Load the policy from model_path and join the other ranks.

        total_steps counts update() calls and sets the length of a cosine schedule. device is "cpu" or "cuda". seed: that of new
        adapters (policy.lora). Raises ValueError when the device is not there, the number of ranks is not policy.num_processes, or
        the adapters do not fit the model.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch sees no GPU; look at CUDA_VISIBLE_DEVICES")
        self._config, self._rollout, self._model_path = config, rollout, Path(model_path)
        self.policy_version = 0  # number of update() calls that led to the current weights
        self._sender: Any = None  # vLLM's sender, once engines are connected
        # A forward pass without gradients on one rank must not wait for the others to broadcast buffers. ResponseLogProbs
        # sets autocast itself, for the frozen reference too.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
        self._accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no", kwargs_handlers=[ddp])
        if self._accelerator.num_processes != config.num_processes:
            raise ValueError(
                f"policy.num_processes is {config.num_processes}, but {self._accelerator.num_processes} learner "
                "processes found each other; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
            )
        if self._sharded and not torch.distributed.is_initialized():
            raise ValueError(
                "policy.sharding shards over a process group, also with one process; set RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT"
            )
        self._policy = self._load_model(model_path, config.lora if config.train else None, seed)
        if config.gradient_checkpointing:
            _enable_gradient_checkpointing(self._policy.model)
        self._reference: ResponseLogProbs | None = None
        if config.kl_coefficient > 0 and config.train:  # with adapters, the policy without them
            base = self._policy if config.lora else self._load_model(model_path).requires_grad_(False)
            self._reference = base
        updates = total_steps * config.minibatches
        trained = (parameter for parameter in self._policy.parameters() if parameter.requires_grad)
        self._optimizer, self._scheduler = build_optimizer(trained, config.optimizer, updates)
        # DDP's wrapper of the policy, if there is one.
        self._prepared = self._policy if self._sharded else self._accelerator.prepare_model(self._policy)

    def _load_model(self, model_path: str, lora: LoraConfig | None = None, seed: int = 0) -> ResponseLogProbs:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        if lora is not None:
            adapters.add_adapters(model, lora, self._config.model, seed)
        policy = ResponseLogProbs(model.eval(), self._rollout.temperature, getattr(torch, self._config.dtype))
        self._shares = self._config.train and can_share(policy)  # before FSDP, whose weights are not whole
        if self._sharded:  # FSDP moves the model layer by layer and keeps only this rank's part
            sharding.shard(policy)
            return policy
        return policy.to(self._accelerator.device)

    def update(self, rollouts: list[ScoredRollout]) -> dict[str, float]:
        """Take policy.minibatches optimizer steps on these rollouts, which must be the same on all ranks.

        A step whose advantages are all 0 is still taken, as is usual, so AdamW's momentum still moves the weights. Returns the
        policy/* metrics of docs/guide/tracking.md, as means over the response tokens of all ranks. Each minibatch needs a rollout
        for each rank, as the rules of a configuration demand. Raises FloatingPointError for a loss or gradient that is not finite,
        before the optimizer moves.
        """
        config = self._config
        minibatches = split_minibatches(rollouts, config.minibatches)
        shares = [self._micro_batches(minibatch) for minibatch in minibatches]
        if config.old_log_probs == "recomputed":
            shares = [[self._with_own_log_probs(batch) for batch in share] for share in shares]

        oldest = min(scored.rollout.segments[0].versions.policy for scored in rollouts)
        values: list[dict[str, Tensor]] = []
        steps: list[tuple[float, float, float]] = []
        for minibatch, share in zip(minibatches, shares, strict=True):
            lengths = [scored.rollout.num_generated for scored in minibatch]
            denominator = loss_denominator(config, lengths, self._rollout.max_new_tokens)
            of_share = [self._forward_backward(batch, denominator, last=batch is share[-1]) for batch in share]
            for batch, of_batch in zip(share, of_share, strict=True):
                if steps:  # only the first step's policy is the one that the engines served
                    del of_batch["rollout_log_prob_gap"]
                elif oldest < self.policy_version:
                    of_batch |= by_lag(of_batch, self.policy_version - batch.versions, self.policy_version - oldest)
            steps.append(self._optimizer_step(share, of_share))
            values += of_share
        self.policy_version += 1
        return step_metrics(values, steps, self._accelerator)

    def _micro_batches(self, minibatch: list[ScoredRollout]) -> list[MicroBatch]:
        """Build this rank's micro-batches. Rollouts whose advantage is 0 get micro-batches of their own, which come first."""
        config, accelerator = self._config, self._accelerator
        share = share_of_rank(minibatch, accelerator.process_index, accelerator.num_processes)
        parts = [[s for s in share if s.advantage == 0], [s for s in share if s.advantage != 0]]
        batches = [micro_batches(p, config.micro_batch_tokens, accelerator.device, self._shares) for p in parts]
        if self._sharded:
            # Each pass gathers the weights of every layer from all ranks, so all ranks must make the same passes.
            counts = torch.tensor([[len(part) for part in batches]], device=accelerator.device)
            some = (batches[0] + batches[1])[0]
            for part, most in enumerate(accelerator.gather(counts).amax(0).tolist()):
                batches[part] += [empty_micro_batch(some, part == 1) for _ in range(most - len(batches[part]))]
        return [batch for part in batches for batch in part]

    @torch.no_grad()
    def _with_own_log_probs(self, batch: MicroBatch) -> MicroBatch:
        # With a single minibatch, the training forward pass gives the same log-probs.
        own = None if self._config.minibatches == 1 else self._log_probs(self._policy, batch)[0]
        return replace(batch, old_log_probs=own)

    @staticmethod
    def _log_probs(model: torch.nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return model(**batch.inputs)

    @torch.no_grad()
    def _reference_log_probs(self, reference: ResponseLogProbs, batch: MicroBatch) -> Tensor:
        with adapters.without_adapters(reference.model):
            return self._log_probs(reference, batch)[0]

    def _forward_backward(self, batch: MicroBatch, denominator: int, last: bool) -> dict[str, Tensor]:
        """Accumulate the gradient of one micro-batch. Returns values [N] of its tokens: their loss and what is logged."""
        # The last micro-batch always runs backward, because DDP exchanges the gradients in that pass.
        with_gradient = last or self._reference is not None or batch.has_advantage
        # FSDP exchanges gradients after each micro-batch: until then, each rank holds those of the whole policy.
        synced = last or self._sharded
        with contextlib.nullcontext() if synced else self._accelerator.no_sync(self._prepared):
            with torch.set_grad_enabled(with_gradient):
                reference = None if self._reference is None else self._reference_log_probs(self._reference, batch)
                log_probs, entropy = self._log_probs(self._prepared if with_gradient else self._policy, batch)
                per_token, values = policy_loss(self._config, denominator, batch, log_probs, reference)
            if with_gradient:
                # Gradients are averaged over the ranks; the loss is already normalised over all of them.
                self._accelerator.backward(per_token.sum() * self._accelerator.num_processes)
        current = log_probs.detach()
        return values | {
            "loss": per_token.detach(),
            "kl": kl_estimate(batch.behaviour_log_probs, current),
            "entropy": entropy,
            "rollout_log_prob_gap": (batch.behaviour_log_probs - current).abs(),
        }

    def _optimizer_step(self, share: list[MicroBatch], values: list[dict[str, Tensor]]) -> tuple[float, float, float]:
        """Take one optimizer step on the accumulated gradient. Returns loss (over all ranks), gradient norm and learning rate."""
        losses = [of_batch.pop("loss") for of_batch in values]
        parameters = self._prepared.parameters()
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

    def write_payload(self, path: str | Path) -> WeightPayload | None:
        """Write the weights for the engines to a file. Returns its description on rank 0. Raises OSError when the disk is full.

        With adapters, it holds what these change, without embedding and head. When the weights are sent without a file, this one
        holds only the embedding and the head, which the drafter trainer needs, and other tensors in turn (see COMPARED_EVERY),
        which the engines compare with what they received.
        """
        model, dtype, names = self._policy.model, getattr(torch, self._rollout.dtype), self._sent
        if self._config.sends_without_file:
            known = sharding.layout(model, dtype, names)
            names = {name for name in known if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
            names |= {*list(known)[self.policy_version % COMPARED_EVERY :: COMPARED_EVERY]}
        return sharding.write_weights(model, dtype, partial(write_tensors, path=path), names)

    def connect_engines(self, client: Any, num_workers: int, address: str) -> None:
        """Prepare to send weights from memory to the engines; see policy_sender.connect."""
        from cotrain.engine import policy_sender

        model, dtype, names = self._policy.model, getattr(torch, self._rollout.dtype), self._sent
        whole = partial(sharding.whole_tensors, model, dtype, names)
        source = policy_sender.PolicySource(sharding.layout(model, dtype, names), whole)
        rank, backend = self._accelerator.process_index, self._config.weight_transfer
        self._sender = policy_sender.connect(backend, rank, source, client, num_workers, address, free_port())

    def send_weights(self) -> int:
        """Send the weights to the connected engines, which must be paused. Returns the number of bytes."""
        self._sender.send_weights()
        tensors = sharding.layout(self._policy.model, getattr(torch, self._rollout.dtype), self._sent).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)

    @torch.no_grad()
    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """Return hidden states of T tokens, to check an engine's: aux [T, A*H] and final [T, H], float32 on the CPU.

        Layer id k is Hugging Face's hidden_states[k], the input of decoder layer k; final is after the final norm. Without
        FSDP, ranks other than 0 return None.
        """
        if not self._is_needed:
            return None
        tokens = torch.tensor([token_ids], device=self._accelerator.device)
        output = self._policy.with_weights(lambda: self._policy.last_hidden(tokens, output_hidden_states=True))
        final = output.last_hidden_state[0]
        aux = torch.cat([final[:, :0], *(output.hidden_states[layer][0] for layer in layers)], dim=-1)
        return aux.float().cpu(), final.float().cpu()

    @torch.no_grad()
    def response_draws(
        self, rollouts: list[Rollout], sampling: SamplingParams, logit_tolerance: float
    ) -> list[Draws] | None:
        """Return each rollout's response tokens as draws from the distributions of the current weights, in float32.

        Without FSDP, ranks other than 0 return None.
        """
        if not self._is_needed:
            return None
        draws = partial(response_draws, self._policy.model, sampling=sampling, logit_tolerance=logit_tolerance)
        return [self._policy.with_weights(partial(draws, r.prompt_token_ids, r.token_ids)) for r in rollouts]

    @property
    def _sent(self) -> set[str] | None:
        """The names of the tensors that updates carry; None for all."""
        return sharding.changing_names(self._policy.model)

    @property
    def _sharded(self) -> bool:
        return self._config.sharding is not None

    @property
    def _is_needed(self) -> bool:
        """Whether this rank must take part in a forward pass whose result only rank 0 needs."""
        return self._sharded or self._accelerator.is_main_process

    def save(self, folder: str | Path, weights: bool = True) -> None:
        """Write weights (a Hugging Face folder, float32) and everything an exact resume needs into one folder.

        With adapters, these alone are written, as peft does. weights: False writes all but the tensors, and so does a policy that does
        not train. The model's own small files are copied, since transformers refuses to save some that it reads.
        """
        folder, model = Path(folder), self._policy.model
        if self._accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            for file in (self._model_path / name for name in (CONFIG, GENERATION_CONFIG)):
                if file.is_file() and self._config.lora is None:
                    shutil.copyfile(file, folder / file.name)
            state = {"policy_version": self.policy_version, "scheduler": self._scheduler.state_dict()}
            with DigestedFile(folder / LEARNER_STATE) as state_file:
                torch.save(state, state_file)
        if not (weights and self._config.train):
            return
        if self._config.lora is None:
            sharding.write_weights(model, torch.float32, partial(save_tensors, path=folder / WEIGHTS))
        else:
            adapters.save_adapters(model, folder, sharding.whole, self._accelerator.is_main_process)
        # Only after the weights: reading those reshards what FSDP leaves unsharded after a forward pass without gradients.
        sharding.save_optimizer(model, self._optimizer, folder)
        self._accelerator.wait_for_everyone()

    def load(self, folder: str | Path) -> None:
        """Continue from a folder that save() wrote with any number of ranks. The reference stays the initial policy."""
        from transformers import AutoModelForCausalLM

        folder, model = Path(folder), self._policy.model
        if not self._config.train:
            return
        if whole := self._config.lora is None:
            weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        else:
            weights = adapters.read_adapters(model, folder)
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=whole))
        sharding.load_optimizer(model, self._optimizer, folder)
        state = torch.load(folder / LEARNER_STATE, map_location="cpu", weights_only=True)
        self._scheduler.load_state_dict(state["scheduler"])
        self.policy_version = state["policy_version"]


def _broken(batch: MicroBatch, losses: Tensor) -> list[str]:
    """Name the rollouts of a micro-batch whose tokens' losses [N] are not all finite."""
    rollouts = [batch.rollouts[index].rollout for index in batch.sequence_ids[~losses.isfinite()].unique()]
    return [f"{rollout.prompt_id}/{rollout.sample_index}" for rollout in rollouts]


def _enable_gradient_checkpointing(model: "PreTrainedModel") -> None:
    """Turn on gradient checkpointing. It needs training mode, which only the layers themselves get, so dropout stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
