"""Embedding and head out of model folders as they come: in one file, in shards, tied."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotrain.trainer.trainer import read_target_weights
from drafters.base import TargetSpec


@pytest.fixture
def read(target):
    def from_folder(folder):
        return read_target_weights(folder, 0, TargetSpec.from_pretrained(target.folder), "cpu")

    return from_folder


def test_a_folder_reads_as_its_file_does(read, target):
    folder, file = read(target.folder), read(target.folder / "model.safetensors")
    assert torch.equal(folder.embedding, file.embedding) and torch.equal(folder.head, file.head)
    assert torch.equal(folder.head, target.model.lm_head.weight)


def test_shards(read, target, tmp_path):
    target.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = read(tmp_path)
    assert torch.equal(weights.embedding, target.model.model.embed_tokens.weight)
    assert torch.equal(weights.head, target.model.lm_head.weight)


def test_a_tied_folder_takes_the_embedding_even_beside_a_leftover_head(read, target, tmp_path):
    tensors = load_file(target.folder / "model.safetensors")
    config = json.loads((target.folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    weights = read(tmp_path)
    assert weights.head is weights.embedding


def test_a_folder_without_an_embedding_is_refused(read, target, tmp_path):
    tensors = load_file(target.folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="expected one embedding"):
        read(tmp_path)
