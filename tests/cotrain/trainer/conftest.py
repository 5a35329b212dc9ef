"""A tiny Hugging Face target, rollouts sampled from it, and their features as the engine would hand them over."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, write_records
from drafters.acceptance import rollout_acceptances
from drafters.base import Drafter, SamplingParams

HIDDEN, VOCAB, AUX_LAYERS = 64, 128, (2, 4, 5)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, draft_sample_method="probabilistic")


def make_record(
    prompt: int = 0, response_length: int = 6, policy_version: int = 0, sampling: SamplingParams = SAMPLING
) -> FeatureRecord:
    """Random features of a rollout whose 4 prompt tokens all are `prompt`."""
    num_tokens = 4 + response_length
    generator = torch.Generator().manual_seed(1000 * prompt + num_tokens)
    token_ids = torch.randint(VOCAB, (num_tokens,), generator=generator)
    token_ids[:4] = prompt
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[-1] = False
    return FeatureRecord(
        token_ids=token_ids,
        aux_hidden=torch.randn(num_tokens, len(AUX_LAYERS) * HIDDEN, generator=generator).bfloat16(),
        final_hidden=torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(),
        feature_mask=mask,
        prompt_length=4,
        policy_version=policy_version,
        sampling=sampling,
        aux_layers=AUX_LAYERS,
    )


@dataclass(frozen=True, eq=False)
class Target:
    """The target's folder, and rollouts from it."""

    folder: Path
    model: LlamaForCausalLM

    def rollouts(self, num_prompts: int, samples: int, seed: int, policy_version: int) -> list[FeatureRecord]:
        """Sampled responses of 20 tokens to prompts of 4, with the features of one forward pass."""
        mask = torch.ones(24, dtype=torch.bool)
        mask[-1] = False
        return [
            FeatureRecord(*row, mask, 4, policy_version, SAMPLING, AUX_LAYERS)
            for row in zip(*self._generate(num_prompts, samples, seed), strict=True)
        ]

    @cache  # noqa: B019
    @torch.no_grad()
    def _generate(self, num_prompts: int, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, aux and final hidden states, each [num_prompts * samples, 24, ...]."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, VOCAB, (num_prompts, 4), generator=generator).repeat_interleave(samples, 0)
        for _ in range(20):
            probabilities = self.model(tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        hidden = self.model.model(tokens, output_hidden_states=True)
        aux = torch.cat([hidden.hidden_states[layer] for layer in AUX_LAYERS], dim=-1)
        return tokens, aux, hidden.last_hidden_state


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Target:
    """8 random layers with large weights, so that the next token is far from uniform."""
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight *= 10
        model.lm_head.weight *= 4
    model.save_pretrained(folder)
    return Target(folder, model)


@pytest.fixture
def shard_of(tmp_path):
    """Write records as a shard, as the engine does."""

    def write(records: list[FeatureRecord], name: str = "features") -> str:
        path = tmp_path / f"{name}.safetensors"
        write_records(path, records)
        return str(path)

    return write


@pytest.fixture
def new_trainer(target, run_config):
    """A trainer that knows the head of policy version 0; keyword arguments replace fields of [drafter]."""

    def build(
        init_folder: str | None = None, seed: int = 0, rollout: RolloutConfig | None = None, **changes
    ) -> DrafterTrainer:
        fields = {
            "model": {"type": "eagle3", "draft_vocab_size": 96, "aux_layers": AUX_LAYERS, "trained_depth": 3},
            "optimizer": {"learning_rate": 3e-3},
            "batch_tokens": 100,
            "updates_per_step": 3,
        }
        rollout = rollout or RolloutConfig(
            num_speculative_tokens=3, max_prompt_tokens=32, max_new_tokens=32, dtype="float32"
        )
        config = run_config(steps=10, seed=seed, rollout=rollout, drafter=fields | changes)
        trainer = DrafterTrainer(trainer_spec(config), target.folder, init_folder)
        trainer.set_target_weights(payload_of(target), 0)
        return trainer

    return build


def payload_of(target: Target) -> str:
    """The target's weights in Hugging Face names."""
    return str(target.folder / "model.safetensors")


def weights_of(trainer: DrafterTrainer) -> dict[str, Tensor]:
    """A copy of the drafter's weights."""
    return {name: tensor.clone() for name, tensor in trainer.drafter.state_for_serving().items()}


def add(trainer: DrafterTrainer, features: list[str]) -> dict[str, float]:
    """Add rollouts to train on, without a candidate to score. Returns the metrics."""
    return trainer.take_in(features, trainer.drafter_version, list(trainer._published), judged=10**9)[1]


def expected_rates(
    trainer: DrafterTrainer, records: list[FeatureRecord], drafter: Drafter | None = None
) -> list[float]:
    """Expected acceptance rate of each draft position, by default of the drafter in training; empty without a whole rollout."""
    [starts] = trainer._starts([drafter or trainer.drafter], records)
    return rollout_acceptances(starts, trainer._served_depth)[-1].rates()
