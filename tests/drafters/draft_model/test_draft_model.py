"""The small draft model against Hugging Face's models of every family, and what it is cut from."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafters.alignment import align
from drafters.base import TargetSpec
from drafters.build import build_drafter, load_drafter, shape_problems
from drafters.config import DraftModelConfig
from drafters.draft_model.model import FAMILIES, evenly_spaced
from drafters.files import read_config
from drafters.target import served_otherwise
from tests.drafters.conftest import DRAFT_MODEL, TARGET, TIED_DRAFT_MODEL, assert_same_state, edit_config, make_batch

ROLLOUTS = (9, 7, 6), (4, 5, 0), (5, 6, 8)


def of_family(model_type: str, tied: bool = False, **fields: object) -> TargetSpec:
    return dataclasses.replace(TARGET, model_type=model_type, tie_word_embeddings=tied, **fields)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A model of four layers as Hugging Face writes it."""
    four = dataclasses.replace(DRAFT_MODEL, config=DraftModelConfig(type="draft_model", num_layers=4))
    four.make().save(tmp_path / "four", torch.float32)
    AutoModelForCausalLM.from_pretrained(tmp_path / "four").save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


SERVED = [
    *((model_type, {}) for model_type in FAMILIES),
    *((model_type, {"sliding_window": 5}) for model_type in FAMILIES if model_type != "llama"),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
]
"""What vLLM and transformers compute alike; policies of other windows and biases are refused."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model_type", "fields"), SERVED, ids=str)
def test_every_draft_position_is_a_row_of_hugging_faces_model(model_type, tied, fields, target_weights, tmp_path):
    kind = dataclasses.replace(DRAFT_MODEL, target=of_family(model_type, tied, **fields))
    drafter = kind.make(trained_depth=4, num_layers=3, sliding_window=fields.get("sliding_window")).float()
    assert ("model.layers.0.mlp.up_proj.bias" in drafter.state_dict()) == ("mlp_bias" in fields)
    drafter.save(tmp_path, torch.float32)
    assert load_drafter(tmp_path, kind.target).shape == drafter.shape
    assert served_otherwise(read_config(tmp_path)) == []
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    batch = make_batch(*ROLLOUTS, dtype=torch.float32)
    alignment = align(batch, 4)
    states, head = drafter.drafts(batch, alignment, target_weights)
    logits = torch.cat([model(batch.token_ids[batch.document_ids == i][None]).logits[0] for i in range(3)])
    compared, total, expected_total = 0, torch.zeros(()), torch.zeros(())
    for position, hidden in enumerate(states):
        starts = alignment.supervised[position]
        expected = logits[alignment.start_rows[starts] + 1 + position]
        torch.testing.assert_close(hidden[starts] @ head.T, expected, rtol=1e-4, atol=1e-4)
        compared += len(expected)
        total, expected_total = total + (hidden[starts] @ head.T).sin().sum(), expected_total + expected.sin().sum()
    assert compared == int(alignment.supervised.sum()) > 20
    total.backward()
    expected_total.backward()
    theirs = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_window_hides_what_lies_before_it(target_weights):
    kind = dataclasses.replace(DRAFT_MODEL, target=of_family("mistral"))
    drafter = kind.make(num_layers=2, sliding_window=5)
    batch = make_batch((3, 17, 0), (3, 17, 0))
    alignment = align(batch, 3)

    def states() -> torch.Tensor:
        return drafter.drafts(batch, alignment, target_weights)[0][0]

    before = states()
    batch.token_ids[20] = (batch.token_ids[20] + 1) % TARGET.vocab_size  # the first of the second rollout
    changed = (states() != before).any(1).nonzero().flatten()
    rows = alignment.start_rows[changed] + 1  # whose states draft position 0 reads
    assert rows.tolist() == list(range(21, 20 + 2 * (5 - 1) + 1))  # two layers see twice as far


def test_a_folder_with_another_window_than_the_engine_would_give_it_is_refused(tmp_path):
    DRAFT_MODEL.make().save(tmp_path, torch.float32)
    with pytest.raises(ValueError, match="made for another target: its sliding_window is None, this one's is 24"):
        load_drafter(tmp_path, of_family("llama", sliding_window=24))
    edit_config(tmp_path, hidden_act="gelu", qkv_bias=True)
    with pytest.raises(
        ValueError, match=r"config\.json has hidden_act = 'gelu', qkv_bias = True: vLLM would serve another"
    ):
        load_drafter(tmp_path, TARGET)


@pytest.mark.parametrize(("num_layers", "chosen"), [(2, [0, 29]), (3, [0, 14, 29]), (4, [0, 10, 19, 29])])
def test_layers_are_evenly_spaced_from_the_first_to_the_last(num_layers, chosen):
    assert evenly_spaced(30, num_layers) == chosen


def test_a_new_one_is_cut_from_the_policy(policy):
    target = TargetSpec.from_pretrained(policy)
    drafter = build_drafter(DRAFT_MODEL.config, target, seed=0)
    drafter.start_from(policy)
    theirs, layers = load_file(policy / "model.safetensors"), {0: 0, 1: 3}
    for name, tensor in drafter.state_dict().items():
        for own, chosen in layers.items():
            name = name.replace(f"layers.{own}.", f"layer {chosen}.")
        assert torch.equal(tensor, theirs[name.replace("layer ", "layers.")]), name
    whole = build_drafter(DraftModelConfig(type="draft_model", num_layers=4), target, seed=0)
    whole.start_from(policy)
    assert_same_state(whole, load_drafter(policy, target))


def test_a_head_left_over_in_a_tied_policy_is_not_taken(tmp_path):
    drafter = TIED_DRAFT_MODEL.make().float()
    drafter.save(tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(40, 16)}, tmp_path / "model.safetensors")
    assert_same_state(load_drafter(tmp_path, TIED_DRAFT_MODEL.target), drafter)
    other = build_drafter(TIED_DRAFT_MODEL.config, TIED_DRAFT_MODEL.target, seed=0)
    other.start_from(tmp_path)
    assert_same_state(other, drafter)


def test_a_policy_with_other_tensors_is_refused(policy):
    drafter = build_drafter(DRAFT_MODEL.config, TargetSpec.from_pretrained(policy), seed=0)
    tensors = load_file(policy / "model.safetensors")
    biases = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(16) for i in range(4)}
    save_file(tensors | biases, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r'Unexpected key.*"model\.layers\.0\.self_attn\.o_proj\.bias"'):
        drafter.start_from(policy)


def test_another_vocabulary_is_refused_before_weights_are_read(tmp_path):
    DRAFT_MODEL.make().save(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, vocab_size=48)
    with pytest.raises(ValueError, match="made for another target: its vocab_size is 48, this one's is 40"):
        load_drafter(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("target", "num_layers", "message"),
    [
        (dataclasses.replace(TARGET, num_layers=3), 4, "drafter.model.num_layers: 4 layers cannot be cut from"),
        (of_family("qwen3_next"), 2, "drafter.model.type: a draft model of model_type qwen3_next cannot be trained"),
        (dataclasses.replace(TARGET, rope_parameters={"rope_type": "llama3"}), 2, "drafter.model.type: only rope_type"),
    ],
)
def test_targets_that_do_not_fit_are_refused_by_field(target, num_layers, message):
    config = DraftModelConfig(type="draft_model", num_layers=num_layers)
    assert [problem.startswith(message) for problem in shape_problems(config, target)] == [True]


def test_depth_is_as_configured_where_a_checkpoint_does_not_say(policy):
    target = TargetSpec.from_pretrained(policy)
    config = DraftModelConfig(type="draft_model", num_layers=4, trained_depth=5)
    edit_config(policy, trained_draft_positions=None)
    assert load_drafter(policy, target, config=config).shape.trained_depth == 5
    assert load_drafter(policy, target).shape.trained_depth == 1
