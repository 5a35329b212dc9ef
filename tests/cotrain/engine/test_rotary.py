"""The rotation that drafters are trained with is the one that vLLM serves them with."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import patch_rope_parameters

from drafters.target import TargetSpec
from drafters.unroll import inverse_frequencies

HEAD, MAX_POSITIONS = 64, 131072
POSITIONS = torch.cat([torch.arange(4096), torch.arange(8000, 8100)])
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "partial": QWEN,
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "llama3": LLAMA3,
    "llama3, partial": LLAMA3 | {"partial_rotary_factor": 0.5},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"rope_theta": 15e4, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, attention_factor": YARN | {"attention_factor": 1.3},
    "mrope": {"type": "mrope", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    "mrope, interleaved": QWEN | {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("rope", CASES.values(), ids=CASES)
def test_tables_of_cos_and_sin_are_vllms(rope: dict[str, Any]) -> None:
    fields = {
        "model_type": "llama", "hidden_size": 2 * HEAD, "num_attention_heads": 2, "vocab_size": 8,
        "num_hidden_layers": 1, "intermediate_size": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": MAX_POSITIONS,
    }  # fmt: skip
    sizes = TargetSpec.from_config(fields | {"rope_parameters": rope}, "here")
    angles, factor = inverse_frequencies(sizes)
    waves = POSITIONS[:, None].float() * angles
    ours = torch.cat([waves.cos() * factor, waves.sin() * factor], -1)
    config = LlamaConfig(**fields, rope_parameters=dict(sizes.rope_parameters))  # what is written to config.json
    patch_rope_parameters(config)
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(HEAD, MAX_POSITIONS, True, config.rope_parameters, torch.float32).cos_sin_cache
    torch.testing.assert_close(ours, theirs[POSITIONS].float(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_follows_the_length_is_refused(kind: str) -> None:
    sizes = TargetSpec("llama", 8, 64, 1, 1, 1, HEAD, 8, 1e-5, {"rope_type": kind, "rope_theta": 1e4}, 512)
    with pytest.raises(ValueError, match=f"rope_type '{kind}' follows the length"):
        inverse_frequencies(sizes)
    assert len(inverse_frequencies(dataclasses.replace(sizes, rope_parameters=CASES["default"]))[0]) == HEAD // 2
