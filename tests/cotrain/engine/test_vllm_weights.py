"""Weights that vLLM's own models serve: loaded, read back exactly, and found when one element differs."""

import functools
import math
from collections import Counter

import pytest
import torch
from torch import nn

from cotrain.engine import cpu_packing
from cotrain.engine import loading as vllm_weights
from cotrain.engine.load_trace import trace_of
from cotrain.engine.served import ServedWeights
from cotrain.weights.payload import manifest_of
from tests.cotrain.engine.conftest import moved

SERVED = {
    "llama": "bfloat16",
    "llama, tied embeddings": "float32",
    "mistral": "float32",
    "qwen2, with biases": "bfloat16",
    "qwen3, with query and key norms": "float32",
    "qwen3-next, with linear attention and experts": "bfloat16",
    "qwen3-next, with experts that are padded": "bfloat16",
    "qwen3-moe": "float32",
    "phi3, whose checkpoints are fused": "float32",
    "gpt-oss, which copies into itself": "float32",
    "deepseek-v3, with latent attention": "float32",
}


@pytest.mark.parametrize(("architecture", "dtype"), SERVED.items())
def test_a_reload_is_served_and_read_back_exactly(serve, experts_are_packed, architecture, dtype):
    served = serve(architecture, dtype)
    assert vllm_weights.differing_tensors(served.model, served.state) == []
    update = moved(served.state)
    assert vllm_weights.differing_tensors(served.model, update) == sorted(update)
    vllm_weights.reload_weights(served.model, served.model_config, update)
    assert vllm_weights.differing_tensors(served.model, update) == []
    assert vllm_weights.differing_tensors(served.model, update, columns=5, turn=3) == []
    assert loaded_elements(served.model, update) == {name: tensor.numel() for name, tensor in update.items()}
    assert vllm_weights.differing_tensors(served.model, with_one_wrong_element(update)) == sorted(update)
    assert vllm_weights.differing_tensors(served.model, update, columns=5, turn=3) == []


def loaded_elements(model: nn.Module, state: dict[str, torch.Tensor]) -> Counter[str]:
    """How many elements of each tensor are somewhere in the model; those in several places count once."""
    copies = {copy for loaded in trace_of(model, manifest_of(state.items())).loaded for copy in loaded.copies}
    found = Counter[str]()
    for _, name, source in copies:
        found[name] += math.prod(source.shape)
    return found


def with_one_wrong_element(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wrong = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in wrong.values():
        tensor.view(-1)[torch.randint(tensor.numel(), (), generator=generator)] += 1
    return wrong


def reload_as_vllm_does(served, state) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(served.model)
    try:
        served.model.load_weights(iter(state.items()))
    finally:
        finalize_layerwise_reload(served.model, served.model_config)


def test_vllm_loses_what_a_model_copies_into_itself_and_a_reload_does_not(serve, experts_are_packed):
    """The experts of gpt-oss with their biases, and the sinks."""
    served = serve("gpt-oss, which copies into itself", "float32")
    update = moved(served.state)
    reload_as_vllm_does(served, update)
    lost = [name for name in update if ".experts." in name or name.endswith(".sinks")]
    assert len(lost) == 20 and vllm_weights.differing_tensors(served.model, update) == sorted(lost)
    kept = vllm_weights.differing_tensors(served.model, served.state)
    assert not {*kept} & {*lost}
    for state in (update, served.state, moved(served.state, seed=2)):
        vllm_weights.reload_weights(served.model, served.model_config, state)
        assert vllm_weights.differing_tensors(served.model, state) == []


def recorded(module: nn.Module) -> torch.Tensor:
    """The weight of a module as vLLM loads it."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(module).restore_metadata[0]["weight"]


def test_vllm_fails_on_a_loader_without_a_name_and_a_reload_does_not(serve):
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    served, loader = serve("llama", "float32"), functools.partial(default_weight_loader)
    recorded(served.model.model.norm).weight_loader = served.model.model.norm.weight.weight_loader = loader
    with pytest.raises(AttributeError, match="__name__"):
        reload_as_vllm_does(served, served.state)
    served = serve("llama", "float32")
    recorded(served.model.model.norm).weight_loader = served.model.model.norm.weight.weight_loader = loader
    update = moved(served.state)
    vllm_weights.reload_weights(served.model, served.model_config, update)
    assert vllm_weights.differing_tensors(served.model, update) == []


@pytest.mark.parametrize("compute", [torch.neg, torch.Tensor.neg_])
def test_a_tensor_that_is_computed_with_on_load_is_named(serve, tmp_path, compute):
    """As Nemotron-H's A_log, of which vLLM serves -exp(A_log)."""
    from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader

    served = serve("llama", "float32")
    weights = ServedWeights(served.model, served.model_config, tmp_path / "kept")
    weights.check_loading()
    recorded(served.model.model.norm).weight_loader = composed_weight_loader(default_weight_loader, compute)
    update = served.state | {"another.weight": torch.zeros(1)}
    assert trace_of(served.model, manifest_of(update.items())).arithmetic == {"model.norm.weight"}
    assert vllm_weights.differing_tensors(served.model, update) == ["another.weight", "model.norm.weight"]
    weights = ServedWeights(served.model, served.model_config, tmp_path / "kept")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        weights.check_loading()


@pytest.fixture(scope="module")
def llama(serve):
    return serve("llama", "float32")


def test_plain_loading_fails_on_cpu_and_a_reload_repairs_what_it_left(llama):
    update = moved(llama.state, seed=2)
    with pytest.raises(AssertionError):
        llama.model.load_weights(iter(update.items()))
    vllm_weights.reload_weights(llama.model, llama.model_config, update)
    assert vllm_weights.differing_tensors(llama.model, update) == []


def test_logits_of_a_tied_model_follow_the_embedding(serve):
    """vLLM's reload alone leaves the packed copy of the head as it was."""
    served = serve("llama, tied embeddings", "float32")
    update = moved(served.state)
    reload_as_vllm_does(served, update)
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        return served.model.lm_head.cpu_linear(hidden, served.model.lm_head.weight, None)[:, :500]

    def expected(state: dict) -> torch.Tensor:
        return hidden @ state["model.embed_tokens.weight"].t()

    torch.testing.assert_close(logits(), expected(served.state))
    assert vllm_weights.differing_tensors(served.model, update) == ["model.embed_tokens.weight"]
    vllm_weights.reload_weights(served.model, served.model_config, update)
    torch.testing.assert_close(logits(), expected(update))


def test_layers_that_are_not_sent_keep_their_weights(llama):
    vllm_weights.reload_weights(llama.model, llama.model_config, llama.state)
    update = moved({name: t for name, t in llama.state.items() if ".layers.1." in name or name == "model.norm.weight"})
    vllm_weights.reload_weights(llama.model, llama.model_config, update)
    assert vllm_weights.differing_tensors(llama.model, llama.state | update) == []


def test_a_failed_reload_leaves_a_model_that_can_be_loaded_again(llama):
    broken = moved(llama.state) | {"model.layers.2.self_attn.o_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(Exception, match=r"3|shape|size"):
        vllm_weights.reload_weights(llama.model, llama.model_config, broken)
    assert not any(parameter.is_meta for parameter in llama.model.parameters())
    vllm_weights.reload_weights(llama.model, llama.model_config, llama.state)
    assert vllm_weights.differing_tensors(llama.model, llama.state) == []


PACKED_IN_ONE = {
    "a row of the fused q, k and v": ("model.layers.0.self_attn.k_proj.weight", (5, 7)),
    "a row of the fused gate and up": ("model.layers.3.mlp.up_proj.weight", (95, 63)),
    "the head, whose unpacked copy is served too": ("lm_head.weight", (499, 0)),
    "a norm": ("model.layers.1.input_layernorm.weight", (2,)),
}


@pytest.mark.parametrize("case", PACKED_IN_ONE)
def test_one_element_that_differs_is_found(llama, case):
    name, index = PACKED_IN_ONE[case]
    vllm_weights.reload_weights(llama.model, llama.model_config, llama.state)
    changed = llama.state[name].clone()
    changed[index] += 1e-6 + changed[index].abs() * 1e-6
    assert vllm_weights.differing_tensors(llama.model, llama.state | {name: changed}) == [name]


def test_a_convolution_is_compared_in_every_copy_that_is_served(serve):
    """CPUs with bfloat16 instructions have a packed one, and one for speculation."""
    served = serve("qwen3-next, with linear attention and experts", "bfloat16")
    name = "model.layers.2.linear_attn.conv1d"
    module = served.model.get_submodule(name)
    copies = [module.weight.data, getattr(module, "_cpu_unpacked_conv_weight", module.weight.data)]
    for copy in copies:
        assert vllm_weights.differing_tensors(served.model, served.state) == []
        first = copy.flatten()[0].clone()
        copy.view(-1)[0] += 1
        assert vllm_weights.differing_tensors(served.model, served.state) == [f"{name}.weight"]
        copy.view(-1)[0] = first


@pytest.mark.parametrize("name", ["W_UV", "W_UK_T"])
def test_the_matrices_that_latent_attention_derives_are_compared(serve, name):
    served = serve("deepseek-v3, with latent attention", "float32")
    attention = next(module for module in served.model.modules() if hasattr(module, name))
    # Here vLLM's are views of the weight.
    copy = nn.Parameter(getattr(attention, name).detach().clone(), requires_grad=False)
    setattr(attention, name, copy)
    assert vllm_weights.differing_tensors(served.model, served.state) == []
    copy[0, 1, 2] += 1
    assert vllm_weights.differing_tensors(served.model, served.state) == ["model.layers.0.self_attn.kv_b_proj.weight"]


@pytest.mark.parametrize(("columns", "turns"), [(24, 4), (40, 3), (96, 1), (200, 1)])
def test_every_column_is_compared_once_in_so_many_turns(llama, columns, turns):
    """A column of the 96 that stays wrong is found, whichever it is and whenever it went wrong."""
    name = "model.layers.0.mlp.down_proj.weight"
    vllm_weights.reload_weights(llama.model, llama.model_config, llama.state)

    def is_found(column, turn):
        changed = llama.state[name].clone()
        changed[:, column] += 1.0
        return bool(vllm_weights.differing_tensors(llama.model, {name: changed}, columns, turn))

    found = [[is_found(column, turn) for turn in range(turns, 2 * turns)] for column in range(96)]
    assert all(any(row) for row in found)
    assert sum(map(sum, found)) == turns * min(columns, 96)


def test_a_tensor_the_model_does_not_serve_is_named(llama):
    assert vllm_weights.differing_tensors(llama.model, {"model.surprise.weight": torch.zeros(1)}) == [
        "model.surprise.weight"
    ]


def test_a_drafter_is_read_back_with_its_vocabulary_map(target_and_drafter):
    _, drafter = target_and_drafter
    assert "d2t" in drafter.state
    vllm_weights.reload_weights(drafter.model, drafter.model_config, drafter.state)
    assert vllm_weights.differing_tensors(drafter.model, drafter.state) == []
    update = moved(drafter.state) | {"d2t": drafter.state["d2t"] + 1}
    vllm_weights.reload_weights(drafter.model, drafter.model_config, update)
    assert vllm_weights.differing_tensors(drafter.model, update) == []
    assert vllm_weights.differing_tensors(drafter.model, drafter.state) == sorted(drafter.state)
    assert loaded_elements(drafter.model, update)["d2t"] == 100


def test_a_drafter_reload_leaves_the_target_alone(target_and_drafter):
    target, drafter = target_and_drafter
    vllm_weights.reload_weights(drafter.model, drafter.model_config, moved(drafter.state, seed=5))
    assert vllm_weights.differing_tensors(target.model, target.state) == []


def test_what_a_drafter_borrows_is_named_as_in_its_checkpoint(target_and_drafter):
    target, drafter = target_and_drafter
    shared = tuple(vllm_weights.modules_shared_with_target(drafter.model, target.model))
    assert "embed_tokens.weight" in shared
    assert not [name for name in drafter.state if name.endswith(shared)]


def test_a_borrowed_head_is_named():
    target, drafter = nn.Module(), nn.Module()
    target.lm_head = drafter.lm_head = nn.Linear(2, 3)
    drafter.fc = nn.Linear(2, 2)
    assert vllm_weights.modules_shared_with_target(drafter, target) == ["lm_head.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_of_more_elements_than_an_element_has_values_is_undone(dtype):
    """More than 2^16 of them, for which 16 bits of a number are not enough."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, 257, generator=generator).to(dtype)
    order = torch.randperm(weights.numel(), generator=generator)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[order].view(257, 300)

    assert torch.equal(cpu_packing._before_packing(pack(weights), weights.shape, pack), weights)
