"""Copies that vLLM's block drafter makes of its weights, in this process without an engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cotrain.engine import cpu, loading
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import DFlashConfig
from tests.cotrain.engine.conftest import ARCHITECTURES, Served, moved
from tests.cotrain.engine.test_vllm_weights import reload_as_vllm_does, with_one_wrong_element

CONFIG = DFlashConfig(type="dflash", draft_vocab_size=100, aux_layers=(1, 2, 3), num_layers=2, mask_token_id=499)
PATCHES = (cpu.copy_packed_projections, cpu.norm_context_keys)


@pytest.fixture
def as_shipped(vllm_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as Model

    for name in ("_build_context_kv_buffers", "_normalize_context_k"):
        monkeypatch.setattr(Model, name, inspect.unwrap(getattr(Model, name)))


@pytest.fixture
def drafter(serve: Callable[..., Served], as_shipped: None, tmp_path: Path) -> Iterator[Served]:
    """A block drafter, loaded by vLLM's own code."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    ARCHITECTURES["llama"].save_pretrained(tmp_path)
    made = build_drafter(CONFIG, TargetSpec.from_pretrained(tmp_path), seed=0)
    made.d2t.copy_(torch.arange(0, 500, 5) - torch.arange(100))
    made.save(tmp_path / "v0", torch.float32)
    config = serve("llama", "float32", tmp_path / "v0", method="dflash").vllm_config
    draft_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config, model_config=draft_config)
        yield Served(model, draft_config, config, load_file(tmp_path / "v0" / "model.safetensors"))


def project(served: Served) -> None:
    served.model.precompute_and_store_context_kv(torch.randn(4, 128), torch.arange(4))


def test_vllm_leaves_the_copies_of_an_update_empty_and_a_reload_renews_them(drafter: Served) -> None:
    project(drafter)
    assert loading.differing_tensors(drafter.model, drafter.state) == []
    update = moved(drafter.state)
    reload_as_vllm_does(drafter, update)
    with pytest.raises(RuntimeError, match="size mismatch"):
        project(drafter)
    for patch in PATCHES:
        cpu.apply(patch)
    for state in (drafter.state, update):
        loading.reload_weights(drafter.model, drafter.model_config, state)
        assert loading.differing_tensors(drafter.model, state) == []
        project(drafter)
    wrong = [name for name in update if name != "d2t"]
    assert set(wrong) <= {*loading.differing_tensors(drafter.model, with_one_wrong_element(update))}


@pytest.mark.parametrize(
    ("copy", "index", "name"),
    [
        ("_fused_kv_weight", (3, 5), "layers.0.self_attn.k_proj.weight"),
        ("_fused_kv_weight", (64 + 7, 5), "layers.0.self_attn.v_proj.weight"),
        ("_fused_kv_weight", (128 + 64 + 7, 5), "layers.1.self_attn.v_proj.weight"),
        ("_k_norm_weights", (1, 3), "layers.1.self_attn.k_norm.weight"),
    ],
)
def test_a_stale_copy_is_found(drafter: Served, copy: str, index: tuple[int, int], name: str) -> None:
    getattr(drafter.model.model, copy)[index] += 1
    assert loading.differing_tensors(drafter.model, drafter.state) == [name]


def test_vllm_norms_the_keys_of_all_layers_by_the_first_and_the_correction_does_not(drafter: Served) -> None:
    model = drafter.model.model
    model._k_norm_weights = torch.stack([torch.full((32,), 1.0), torch.full((32,), 3.0)])
    keys = torch.randn(2, 5, 2, 32)
    expected = keys / (keys.square().mean(-1, keepdim=True) + model._rms_norm_eps).sqrt()
    torch.testing.assert_close(model._normalize_context_k(keys), expected)  # the second layer's are not 3 times that
    cpu.apply(cpu.norm_context_keys)
    torch.testing.assert_close(model._normalize_context_k(keys), expected * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
