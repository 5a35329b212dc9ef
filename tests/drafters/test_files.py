"""What is read of a model's folder without its weights."""

import json
from pathlib import Path

import pytest

from drafters.files import text_fields, text_tensors

NAMES = [
    "lm_head.weight", "model.language_model.layers.0.mlp.up_proj.weight", "model.visual.blocks.0.attn.proj.weight",
    "mtp.layers.0.mlp.up_proj.weight", "model.multi_modal_projector.lm_head_norm.weight",
]  # fmt: skip


@pytest.mark.parametrize(("config", "number"), [({}, len(NAMES)), ({"text_config": {}}, 2)])
def test_a_wrappers_language_model_is_told_from_its_other_parts(tmp_path: Path, config: dict, number: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert text_tensors(tmp_path, NAMES) == NAMES[:number]


def test_the_fields_of_a_wrappers_language_model_come_first() -> None:
    config = {"model_type": "qwen3_5", "vocab_size": 1, "text_config": {"model_type": "qwen3_5_text"}}
    assert text_fields(config) == config | {"model_type": "qwen3_5_text"}
    assert text_fields({"text_config": None, "vocab_size": 1})["vocab_size"] == 1
