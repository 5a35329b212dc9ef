"""Each trap of vLLM that vllm_compat.py steps over: what vLLM does by itself, and what it does with cotrain.

A test of the first kind that fails means that vLLM has changed, and that its patch may go.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from cotrain import threads
from cotrain.rollout import vllm_compat
from tests.cotrain.rollout.conftest import moved
from tests.cotrain.rollout.sampling_faults import NUM_REQUESTS, TEMPERATURES, VOCAB

# ---------------------------------------------------------------------------------------------------------------
# Patches of the sampler
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampling_faults():
    """What sampling_faults.py found."""
    root = Path(__file__).parents[3]
    environment = os.environ | threads.engine_environment(1, 1) | {"PYTHONPATH": str(root)}
    script = Path(__file__).with_name("sampling_faults.py")
    process = subprocess.run([sys.executable, script], env=environment, cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


PER_DRAFT_TOKEN = {"temperature": [0.5, 0.5, 1.0, 1.0, 1.0], "top_k": [7, 7, 40, 40, 40]}


def test_vllm_loses_the_sampling_parameters_of_draft_tokens(sampling_faults):
    assert sampling_faults["before"]["expanded"]["temperature"] != PER_DRAFT_TOKEN["temperature"]
    assert sampling_faults["before"]["expanded"]["top_k"] != PER_DRAFT_TOKEN["top_k"]


def test_with_the_patch_each_draft_token_has_its_requests_parameters(sampling_faults):
    assert sampling_faults["after"]["expanded"] == PER_DRAFT_TOKEN


def p_values(counts: list[list[int]], top_k: int = VOCAB) -> list[float]:
    """Chi-square test of the first token at each temperature."""
    values = []
    for temperature, observed in zip(TEMPERATURES, counts, strict=True):
        logits = torch.linspace(-2, 2, VOCAB, dtype=torch.float64)[-top_k:]
        expected = torch.softmax(logits / temperature, dim=0) * NUM_REQUESTS / 2
        assert not any(observed[:-top_k])
        values.append(chisquare(observed[-top_k:], expected.tolist()).pvalue)
    return values


def test_vllms_verification_has_another_distribution_than_the_target(sampling_faults):
    assert max(p_values(sampling_faults["before"]["counts"])) < 1e-100


def test_with_the_patch_verification_has_the_targets_distribution(sampling_faults):
    """Seeded, so it fails always or never; four tests at 1e-4 are the chance that a right sampler was unlucky."""
    after = sampling_faults["after"]
    assert min(p_values(after["counts"]) + p_values(after["counts_top_k"], top_k=3)) > 1e-4


def test_vllm_fails_on_a_step_without_draft_tokens_and_with_top_k(sampling_faults):
    assert "numel() == 0" in sampling_faults["before"]["top_k_error"]


def test_with_the_patch_such_a_step_passes(sampling_faults):
    assert sampling_faults["after"]["top_k_error"] is None


def test_patches_are_reported_each_time(sampling_faults):
    first, again = sampling_faults["patches"]
    assert first == again
    assert {"sampling_parameters_of_draft_tokens", "sampling_without_draft_tokens", "samples_thrown_away"} <= set(first)


def chunked_prefill() -> SimpleNamespace:
    """A model runner in whose batch the second of three seeded requests has a part of its prompt before it."""
    generators = {i: torch.Generator().manual_seed(i) for i in range(3)}
    return SimpleNamespace(
        use_async_scheduling=False,
        input_batch=SimpleNamespace(num_reqs=3, generators=generators),
        discard_request_mask=SimpleNamespace(np=np.array([False, True, False, True])),
    )


def test_vllm_fails_on_a_seeded_request_that_is_prefilled_in_chunks():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        GPUModelRunner._bookkeeping_sync(chunked_prefill(), None, None, None, None, 0)


def test_with_the_patch_its_generator_is_not_used(monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample_tokens(runner, grammar_output):
        for i in np.nonzero(runner.discard_request_mask.np[:3])[0]:
            assert int(i) not in runner.input_batch.generators
        return list(runner.input_batch.generators), grammar_output

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    vllm_compat.patch_samples_thrown_away()
    vllm_compat.patch_samples_thrown_away()
    runner = chunked_prefill()
    generators = dict(runner.input_batch.generators)
    assert GPUModelRunner.sample_tokens(runner, "grammar") == ([0, 2], "grammar")
    assert runner.input_batch.generators == generators


def test_another_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"cotrain supports vLLM 0\.32, this is 0\.33\.0"):
        vllm_compat.apply_patches()


# ---------------------------------------------------------------------------------------------------------------
# Weights as they are served
# ---------------------------------------------------------------------------------------------------------------


SERVED = {
    "llama": "bfloat16",
    "llama, tied embeddings": "float32",
    "mistral": "float32",
    "qwen2, with biases": "bfloat16",
    "qwen3, with query and key norms": "float32",
}


@pytest.mark.parametrize(("architecture", "dtype"), SERVED.items())
def test_a_reload_is_served_and_read_back_exactly(serve, architecture, dtype):
    served = serve(architecture, dtype)
    assert vllm_compat.differing_tensors(served.model, served.state) == []
    update = moved(served.state)
    assert vllm_compat.differing_tensors(served.model, update) == sorted(update)
    vllm_compat.reload_weights(served.model, served.model_config, update)
    assert vllm_compat.differing_tensors(served.model, update) == []
    assert vllm_compat.differing_tensors(served.model, update, columns=5, seed=3) == []
    read = vllm_compat.served_tensors(served.model, update)
    assert {name: tensor.shape for name, tensor in read.items()} == {n: t.shape for n, t in update.items()}
    assert all(torch.equal(read[name], update[name]) for name in update)


@pytest.fixture(scope="module")
def llama(serve):
    return serve("llama", "float32")


def test_plain_loading_fails_on_cpu_and_a_reload_repairs_what_it_left(llama):
    update = moved(llama.state, seed=2)
    with pytest.raises(AssertionError):
        llama.model.load_weights(iter(update.items()))
    vllm_compat.reload_weights(llama.model, llama.model_config, update)
    assert vllm_compat.differing_tensors(llama.model, update) == []


def test_logits_of_a_tied_model_follow_the_embedding(serve):
    """vLLM's reload alone leaves the packed copy of the head as it was."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    served = serve("llama, tied embeddings", "float32")
    update = moved(served.state)
    initialize_layerwise_reload(served.model)
    served.model.load_weights(iter(update.items()))
    finalize_layerwise_reload(served.model, served.model_config)
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        return served.model.lm_head.cpu_linear(hidden, served.model.lm_head.weight, None)[:, :500]

    def expected(state: dict) -> torch.Tensor:
        return hidden @ state["model.embed_tokens.weight"].t()

    torch.testing.assert_close(logits(), expected(served.state))
    assert vllm_compat.differing_tensors(served.model, update) == ["model.embed_tokens.weight"]
    vllm_compat.reload_weights(served.model, served.model_config, update)
    torch.testing.assert_close(logits(), expected(update))


def test_layers_that_are_not_sent_keep_their_weights(llama):
    vllm_compat.reload_weights(llama.model, llama.model_config, llama.state)
    update = moved({name: t for name, t in llama.state.items() if ".layers.1." in name or name == "model.norm.weight"})
    vllm_compat.reload_weights(llama.model, llama.model_config, update)
    assert vllm_compat.differing_tensors(llama.model, llama.state | update) == []


def test_a_failed_reload_leaves_a_model_that_can_be_loaded_again(llama):
    broken = moved(llama.state) | {"model.layers.2.self_attn.o_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(Exception, match=r"3|shape|size"):
        vllm_compat.reload_weights(llama.model, llama.model_config, broken)
    assert not any(parameter.is_meta for parameter in llama.model.parameters())
    vllm_compat.reload_weights(llama.model, llama.model_config, llama.state)
    assert vllm_compat.differing_tensors(llama.model, llama.state) == []


PACKED_IN_ONE = {
    "a row of the fused q, k and v": ("model.layers.0.self_attn.k_proj.weight", (5, 7)),
    "a row of the fused gate and up": ("model.layers.3.mlp.up_proj.weight", (95, 63)),
    "the head, whose unpacked copy is served too": ("lm_head.weight", (499, 0)),
    "a norm": ("model.layers.1.input_layernorm.weight", (2,)),
}


@pytest.mark.parametrize("case", PACKED_IN_ONE)
def test_one_element_that_differs_is_found(llama, case):
    name, index = PACKED_IN_ONE[case]
    vllm_compat.reload_weights(llama.model, llama.model_config, llama.state)
    changed = llama.state[name].clone()
    changed[index] += 1e-6 + changed[index].abs() * 1e-6
    assert vllm_compat.differing_tensors(llama.model, llama.state | {name: changed}) == [name]


def test_the_seed_draws_the_columns_that_are_compared(llama):
    name = "model.layers.0.mlp.down_proj.weight"
    vllm_compat.reload_weights(llama.model, llama.model_config, llama.state)
    changed = llama.state | {name: llama.state[name].clone()}
    changed[name][:, 10] += 1.0
    found = [bool(vllm_compat.differing_tensors(llama.model, changed, columns=24, seed=s)) for s in range(40)]
    assert 2 <= sum(found) <= 20  # one of four in the mean


def test_a_tensor_the_model_does_not_serve_is_named(llama):
    assert vllm_compat.differing_tensors(llama.model, {"model.surprise.weight": torch.zeros(1)}) == [
        "model.surprise.weight"
    ]


def test_a_drafter_is_read_back_with_its_vocabulary_map(target_and_drafter):
    _, drafter = target_and_drafter
    assert "d2t" in drafter.state
    assert vllm_compat.differing_tensors(drafter.model, drafter.state) == []
    update = moved(drafter.state) | {"d2t": drafter.state["d2t"] + 1}
    vllm_compat.reload_weights(drafter.model, drafter.model_config, update)
    assert vllm_compat.differing_tensors(drafter.model, update) == []
    assert vllm_compat.differing_tensors(drafter.model, drafter.state) == sorted(drafter.state)
    assert torch.equal(vllm_compat.served_tensors(drafter.model, ["d2t"])["d2t"], update["d2t"])


def test_a_drafter_reload_leaves_the_target_alone(target_and_drafter):
    target, drafter = target_and_drafter
    vllm_compat.reload_weights(drafter.model, drafter.model_config, moved(drafter.state, seed=5))
    assert vllm_compat.differing_tensors(target.model, target.state) == []


def test_what_a_drafter_borrows_is_named_as_in_its_checkpoint(target_and_drafter):
    target, drafter = target_and_drafter
    shared = tuple(vllm_compat.modules_shared_with_target(drafter.model, target.model))
    assert "embed_tokens.weight" in shared
    assert not [name for name in drafter.state if name.endswith(shared)]


def test_a_borrowed_head_is_named():
    target, drafter = nn.Module(), nn.Module()
    target.lm_head = drafter.lm_head = nn.Linear(2, 3)
    drafter.fc = nn.Linear(2, 2)
    assert vllm_compat.modules_shared_with_target(drafter, target) == ["lm_head.weight"]


def test_loaded_tensors_outlive_their_file(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    tensors = vllm_compat.load_safetensors(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(tensors["w"], torch.ones(1000))
