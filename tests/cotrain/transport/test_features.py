import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cotrain.transport.features import read_shard, write_records
from tests.cotrain.trainer.conftest import make_record

TENSOR_FIELDS = ("token_ids", "aux_hidden", "final_hidden", "feature_mask")


def rewrite(path, **changes):
    """Change tensors or metadata (None: take out) of the last rollout of a shard."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        others = json.loads(file.metadata()["cotrain"])
    for name, value in changes.items():
        part, key = (others[1], name) if name in others[1] else (tensors, f"1.{name}")
        part[key] = value
        if value is None:
            del part[key]
    save_file(tensors, path, metadata={"cotrain": json.dumps(others)})


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "features.safetensors"
    write_records(path, [make_record(prompt=1), make_record(prompt=2, response_length=3)])
    return path


def test_what_is_written_is_read_and_the_file_is_no_longer_needed(shard):
    written = [make_record(prompt=1), make_record(prompt=2, response_length=3)]
    assert all(record.log_probs is None for record in read_shard(shard))
    read = read_shard(shard)
    shard.write_bytes(b"overwritten")
    assert len(read) == 2
    for old, new in zip(written, read, strict=True):
        assert all(torch.equal(getattr(old, name), getattr(new, name)) for name in TENSOR_FIELDS)
        assert new.aux_hidden.dtype == torch.bfloat16
        assert (new.prompt_length, new.policy_version, new.sampling, new.aux_layers) == (4, 0, old.sampling, (2, 4, 5))
        assert new.num_bytes == old.num_bytes == new.num_tokens * (8 + 2 * 4 * 64 + 1)


def test_the_turns_of_a_trajectory_are_kept_and_observed_tokens_are_neither_response_nor_trained_on(tmp_path):
    record = replace(make_record(response_length=8), turns=((4, 6), (9, 12)))
    write_records(tmp_path / "shard", [record])
    [read] = read_shard(tmp_path / "shard")
    assert read.turns == ((4, 6), (9, 12)) and read.num_turns == 2
    assert read.response_mask.nonzero().flatten().tolist() == [4, 5, 9, 10, 11]
    last = replace(read, earlier_tokens=3).last_segment()
    assert last.num_turns == 1 and last.response_mask.nonzero().flatten().tolist() == [9, 10, 11]
    read.feature_mask[:] = False
    read.feature_mask[5:7] = True  # they could only draft an observed token
    assert not read.is_trainable
    read.feature_mask[7:9] = True
    assert read.is_trainable


def test_prompt_key_is_that_of_the_prompt_alone():
    assert make_record(prompt=1).prompt_key == make_record(prompt=1, response_length=9).prompt_key
    assert make_record(prompt=1).prompt_key != make_record(prompt=2).prompt_key


def test_trainable_needs_two_rows_with_features_before_a_generated_token():
    assert make_record(response_length=1).is_trainable
    record = make_record(response_length=3)
    record.feature_mask[3:] = False  # row 2 has features, but nothing to compare its draft with
    assert not record.is_trainable
    record.feature_mask[3] = True
    assert record.is_trainable


def test_a_missing_or_truncated_shard_is_an_error_that_names_it(shard):
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"features\.safetensors cannot be read"):
        read_shard(shard)
    shard.write_bytes(b"\xff" * 200)
    with pytest.raises(ValueError, match="cannot be read"):
        read_shard(shard)
    shard.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        read_shard(shard)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_layers": [2, 4]}, "aux_hidden has 192 columns, 2 layers have 128"),
        ({"policy_version": None}, "policy_version"),
        ({"sampling": 3}, "mapping"),
        ({"token_ids": torch.arange(6)}, r"the tensors of rollout 1 have \[6, 7\] rows"),
        ({"feature_mask": torch.ones(7, dtype=torch.bool)}, "rollout 1 claims features for its last token"),
        ({"final_hidden": None}, "final_hidden"),
    ],
)
def test_garbled_shard_is_an_error_that_says_what_is_wrong(shard, change, message):
    rewrite(shard, **change)
    with pytest.raises(ValueError, match=rf"features\.safetensors.*{message}"):
        read_shard(shard)


@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden"])
def test_feature_that_is_not_finite_is_named_unless_it_is_a_hole(shard, name):
    with safe_open(shard, framework="pt") as file:
        hidden = file.get_tensor(f"1.{name}").clone()
    hidden[2, 3] = torch.nan
    mask = torch.ones(7, dtype=torch.bool)
    mask[[2, 6]] = False
    rewrite(shard, **{name: hidden, "feature_mask": mask})
    read_shard(shard)
    mask[2] = True
    rewrite(shard, feature_mask=mask)
    with pytest.raises(ValueError, match=f"{name} of rollout 1 is not finite at position 2"):
        read_shard(shard)
