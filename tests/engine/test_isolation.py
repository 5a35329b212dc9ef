"""The drafter trainer beside the policy learner, as Ray actors: it must not move the policy by a bit."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cotrain.actors.drafter import start_drafter
from cotrain.actors.policy import start_policy
from cotrain.config.schema import DrafterBufferConfig, DrafterConfig, PolicyConfig, RolloutConfig, RunConfig
from cotrain.process.cluster import Cluster
from cotrain.records import Rollout, ScoredRollout, Versions
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, write_records
from cotrain.transport.nodes import Nodes
from drafters.base import SamplingParams
from tests.engine.conftest import AUX_LAYERS, features_of

pytestmark = [pytest.mark.engine, pytest.mark.long]  # two sets of Ray actors

PROMPT, RESPONSE = 10, 20


def make_rollouts() -> list[ScoredRollout]:
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i in range(8):
        tokens = torch.randint(40, 120, (PROMPT + RESPONSE,), generator=generator).tolist()
        rollout = Rollout(
            f"p{i // 2}", i % 2, tokens[:PROMPT], tokens[PROMPT:], [-4.0] * RESPONSE, "", "length", Versions(0, 0)
        )
        rollouts.append(ScoredRollout(rollout, float(i % 2), 1.0 if i % 2 else -1.0))
    return rollouts


def write_features(path: Path, model: torch.nn.Module, rollouts: list[ScoredRollout]) -> str:
    batches = [
        features_of(model, r.rollout.prompt_token_ids + r.rollout.token_ids, PROMPT, i) for i, r in enumerate(rollouts)
    ]
    write_records(
        path,
        [
            FeatureRecord(
                b.token_ids, b.aux_hidden, b.final_hidden, b.feature_mask, PROMPT, 0,
                SamplingParams(1.0, 1.0, 0, "probabilistic"), AUX_LAYERS,
            )
            for b in batches
        ],
    )  # fmt: skip
    return str(path)


def test_policy_updates_are_bit_identical_with_the_drafter_trained_or_not(
    target_folder: Path, target_model: torch.nn.Module, tmp_path: Path
) -> None:
    config = RunConfig.model_validate(
        {
            "name": "isolation",
            "steps": 2,
            "policy": PolicyConfig(model="tiny:llama"),
            "rollout": RolloutConfig(
                prompts_per_step=4, samples_per_prompt=2, max_prompt_tokens=32, max_new_tokens=32, dtype="float32"
            ),
            "drafter": DrafterConfig.model_validate(
                {
                    "model": {"type": "eagle3", "draft_vocab_size": 128, "aux_layers": AUX_LAYERS},
                    "updates_per_step": 4,
                    "gate": {"publish_when": "always"},  # eight rollouts are too few to judge by
                    "buffer": DrafterBufferConfig(max_age=1),
                }
            ),
            "task": {"type": "reasoning_gym", "name": "chain_sum"},
        }
    )
    rollouts = make_rollouts()
    with ExitStack() as stack:
        cluster = Cluster(config, tmp_path)
        stack.callback(cluster.stop)
        nodes = Nodes(cluster, "isolation")
        stack.callback(nodes.close)
        scratch, nodes.model_path = nodes.scratch[nodes.local], target_folder
        alone = start_policy(cluster, nodes, config)
        for _ in range(2):
            alone.finish(alone.begin_update(rollouts))
        digests_alone = alone.write_payload(scratch / "alone.safetensors").digests

        beside = start_policy(cluster, nodes, config)
        drafter = start_drafter(cluster, nodes, config, None)
        first = beside.write_payload(scratch / "first.safetensors")
        drafter.call(DrafterTrainer.set_target_weights, first.path, 0)
        for step in (1, 2):
            shard = write_features(scratch / f"features_{step}.safetensors", target_model, rollouts)
            update = beside.begin_update(rollouts)
            drafter.take_in([shard], 0, (), 0)
            learned = drafter.call(DrafterTrainer.train, step, 4)
            beside.finish(update)
            assert learned["drafter/loss"] > 0
        digests_beside = beside.write_payload(scratch / "beside.safetensors").digests
    assert digests_beside == digests_alone
    assert digests_beside != first.digests
