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
MORE = DFlashConfig(**CONFIG.model_dump() | {"type": "dspark", "markov_rank": 24})
PATCHES = (cpu.copy_packed_projections, cpu.norm_context_keys)


@pytest.fixture
def as_shipped(vllm_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as Model

    for name in ("_build_context_kv_buffers", "_normalize_context_k"):
        monkeypatch.setattr(Model, name, inspect.unwrap(getattr(Model, name)))


@pytest.fixture
def loaded(serve: Callable[..., Served], as_shipped: None, tmp_path: Path) -> Callable[[DFlashConfig], Served]:
    """A block drafter, loaded by vLLM's own code. Its runner V1 refuses the configuration of DSpark, but not its model."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    def load(config: DFlashConfig) -> Served:
        ARCHITECTURES["llama"].save_pretrained(tmp_path)
        target, folder = TargetSpec.from_pretrained(tmp_path), tmp_path / "v0"
        build_drafter(CONFIG, target, seed=0).save(folder, torch.float32)
        vllm_config = serve("llama", "float32", folder, method="dflash").vllm_config
        made = build_drafter(config, target, seed=0)
        made.d2t.copy_(torch.arange(0, 500, 5) - torch.arange(100))
        made.save(folder, torch.float32)
        speculation = vllm_config.speculative_config
        speculation.draft_model_config.hf_config.update(made.to_config(made.shape))
        speculation.update_arch_()
        with set_current_vllm_config(vllm_config):
            model = get_model(vllm_config=vllm_config, model_config=speculation.draft_model_config)
        return Served(model, speculation.draft_model_config, vllm_config, load_file(folder / "model.safetensors"))

    return load


@pytest.fixture
def drafter(loaded: Callable[[DFlashConfig], Served]) -> Iterator[Served]:
    from vllm.config import set_current_vllm_config

    served = loaded(CONFIG)
    with set_current_vllm_config(served.vllm_config):
        yield served


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


def test_the_heads_of_dspark_are_served_as_they_are_trained(loaded: Callable[[DFlashConfig], Served]) -> None:
    from vllm.config import set_current_vllm_config

    for patch in PATCHES:
        cpu.apply(patch)
    served = loaded(MORE)
    with set_current_vllm_config(served.vllm_config):
        state = moved(served.state)
        loading.reload_weights(served.model, served.model_config, state)
        assert loading.differing_tensors(served.model, state) == []
        assert {*loading.differing_tensors(served.model, with_one_wrong_element(state))} == {*state}
        hidden, tokens = torch.randn(5, 128), torch.tensor([3, 499, 7, 0, 250])
        before = served.model.markov_embed(tokens)
        logits = served.model.compute_draft_logits(hidden) + served.model.markov_bias(before)
        confidence = served.model.compute_confidence(hidden, before)
    ours = torch.cat([hidden, state["markov_head.markov_w1.weight"][tokens]], -1)
    head = torch.cat([state["lm_head.weight"], state["markov_head.markov_w2.weight"]], -1)
    torch.testing.assert_close(logits, ours @ head.T, rtol=1e-4, atol=1e-5)
    estimate = ours @ state["confidence_head.proj.weight"].T + state["confidence_head.proj.bias"]
    torch.testing.assert_close(confidence, estimate.sigmoid().squeeze(-1), rtol=1e-4, atol=1e-5)
