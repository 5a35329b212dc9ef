"""Adapters against peft's own, and a policy of which nothing else trains. Ranks that share one are in the tests of DDP and FSDP2."""

from pathlib import Path

import pytest
import torch
from policy_cases import ROLLOUT, make_learner, make_rollouts, merged_by_peft, save_tiny_model, served_state
from safetensors.torch import load_file
from torch import Tensor

from cotrain.config.schema import PolicyConfig, RolloutConfig
from cotrain.policy.adapters import without_adapters
from cotrain.policy.learner import PolicyLearner

LORA = {"rank": 4, "alpha": 6.0}
BFLOAT16 = ROLLOUT.model_copy(update={"dtype": "bfloat16"})


def base_of(learner: PolicyLearner) -> dict[str, Tensor]:
    state = learner._policy.model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if ".lora_" not in name}


@pytest.fixture(params=["llama", "qwen3", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model", request.param)


@pytest.mark.parametrize("rollout", [ROLLOUT, BFLOAT16], ids=lambda rollout: rollout.dtype)
def test_engines_get_what_peft_merges(model: str, tmp_path: Path, rollout: RolloutConfig) -> None:
    learner = make_learner(model, rollout, lora=LORA)
    base = base_of(learner)
    for seed in range(2):
        learner.update(make_rollouts(model, seed))
    learner.save(tmp_path / "saved")
    payload = learner.write_payload(tmp_path / "policy.safetensors")
    assert payload is not None
    sent = load_file(payload.path)
    merged = merged_by_peft(model, tmp_path / "saved", rollout.dtype)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in sent.items())
    changed = {
        name
        for name, tensor in served_state(make_learner(model, rollout)).items()
        if not torch.equal(tensor, merged[name])
    }
    assert changed and changed <= sent.keys()
    assert not any(part in name for name in sent for part in ("embed_tokens", "lm_head", ".experts.", "model.norm"))
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_of(learner).items())  # the policy is not merged


def test_a_whole_module_is_sent_as_engines_fuse_its_matrices(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    learner = make_learner(model, lora=LORA | {"target_modules": ["q_proj", "v_proj"]})
    names = {f"model.layers.{layer}.self_attn.{side}_proj.weight" for layer in range(2) for side in "qkvo"}
    assert learner._sent == names


def test_only_adapters_have_gradients_and_moments(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    learner = make_learner(model, lora=LORA)
    learner.update(make_rollouts(model))
    trained = {name for name, parameter in learner._policy.model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert len(learner._optimizer.state) == len(trained)


def test_the_reference_is_the_base_while_adapters_train(tmp_path: Path) -> None:
    """Its log-probs are those of a second, frozen model, and the gradient reaches the adapters beside it."""
    model = save_tiny_model(tmp_path / "model", "llama")
    learner, whole = (make_learner(model, kl_coefficient=0.1, **fields) for fields in ({"lora": LORA}, {}))
    batch = learner._micro_batches(make_rollouts(model))[0]
    for seed in range(3):
        metrics = learner.update(make_rollouts(model, seed))
        assert metrics["policy/grad_norm"] > 0
    assert learner._reference is learner._policy and whole._reference is not None
    expected = whole._log_probs(whole._reference, batch)[0]
    assert torch.equal(learner._reference_log_probs(learner._policy, batch), expected)
    assert not torch.equal(learner._log_probs(learner._policy, batch)[0], expected)
    with pytest.raises(KeyError), without_adapters(learner._policy.model):
        raise KeyError
    assert not torch.equal(learner._log_probs(learner._policy, batch)[0], expected)


def test_a_resumed_learner_continues_to_the_bit(model: str, tmp_path: Path) -> None:
    fields = {"lora": LORA, "minibatches": 2, "kl_coefficient": 0.1}
    learner = make_learner(model, **fields)
    for seed in range(2):
        learner.update(make_rollouts(model, seed))
    learner.save(tmp_path / "saved")
    resumed = make_learner(model, **fields)
    resumed.update(make_rollouts(model, 7))  # the state that is loaded replaces another
    resumed.load(tmp_path / "saved")
    assert resumed.update(make_rollouts(model, 3)) == learner.update(make_rollouts(model, 3))
    one, other = served_state(learner), served_state(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_a_folder_of_other_adapters_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    make_learner(model, lora=LORA).save(tmp_path / "saved")
    other = make_learner(model, lora=LORA | {"target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match=r"has other adapters than policy\.lora"):
        other.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("kind", "targets", "reason"),
    [
        ("llama", ["nope"], "fits no module of the model"),
        ("llama", ["lm_head"], "has embedding or head, which the drafter shares"),
        ("qwen3", ["embed_tokens", "q_proj"], "has embedding or head"),
        ("qwen3_next", ["gate_proj"], "only layers outside its MLPs get adapters"),
        ("qwen3_next", "nope", "only layers outside its MLPs get adapters"),
    ],
)
def test_modules_that_cannot_have_adapters_are_refused(
    tmp_path: Path, kind: str, targets: list[str], reason: str
) -> None:
    model = save_tiny_model(tmp_path / "model", kind)
    with pytest.raises(ValueError, match=rf"^policy\.lora\.target_modules: .*{reason}"):
        make_learner(model, lora={"target_modules": targets})


def test_ranks_begin_with_the_same_adapters_and_other_seeds_with_others(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    torch.manual_seed(1)
    one = make_learner(model, lora=LORA)._policy.model.state_dict()
    torch.manual_seed(2)
    other = make_learner(model, lora=LORA)._policy.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    config = PolicyConfig.model_validate({"model": "tiny", "lora": LORA})
    seeded = PolicyLearner(config, ROLLOUT, model, total_steps=6, seed=1)._policy.model.state_dict()
    assert any(not torch.equal(one[name], seeded[name]) for name in one)
