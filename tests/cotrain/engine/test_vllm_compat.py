"""Each trap of vLLM that cpu.py steps over: what vLLM does by itself, and what it does with cotrain.

A test of the first kind that fails means that vLLM has changed, and that its patch may go.
"""

import inspect
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

from cotrain.engine import cpu as vllm_compat
from cotrain.engine import loading as vllm_weights
from cotrain.process import threads
from tests.cotrain.engine.conftest import moved
from tests.cotrain.engine.sampling_faults import NUM_REQUESTS, TEMPERATURES, VOCAB


@pytest.fixture(scope="module")
def sampling_faults():
    """What sampling_faults.py found."""
    root = Path(__file__).parents[3]
    environment = os.environ | threads.engine_environment(1) | {"PYTHONPATH": str(root)}
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
    """Seeded, so it fails always or never; eight tests at 1e-4 are the chance that a right sampler was unlucky."""
    after = sampling_faults["after"]
    found = [p_values(after[law]) for law in ("counts", "counts_greedy", "counts_nan")]
    assert min(sum(found, p_values(after["counts_top_k"], top_k=3))) > 1e-4


def test_a_seeded_request_is_given_its_own_recovered_tokens(sampling_faults):
    own, others = zip(*sampling_faults["after"]["seeded"], strict=True)
    assert len(set(own)) == 1
    assert len(set(others)) > 1


def test_vllm_refuses_acceptance_at_given_rates(sampling_faults):
    assert sampling_faults["before"]["rates"] == "Synthetic acceptance not supported with CPU sampling"


def test_with_the_patch_drafts_are_accepted_at_these_rates(sampling_faults):
    expected = [NUM_REQUESTS * share for share in (0.2, 0.8 * 0.75, 0.8 * 0.25)]
    for counts in sampling_faults["after"]["rates"]:
        assert chisquare(counts, expected).pvalue > 1e-4


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
    vllm_compat.apply(vllm_compat.spare_generators)
    runner = chunked_prefill()
    generators = dict(runner.input_batch.generators)
    assert GPUModelRunner.sample_tokens(runner, "grammar") == ([0, 2], "grammar")
    assert runner.input_batch.generators == generators


def test_another_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"cotrain supports vLLM 0\.32, this is 0\.33\.0"):
        vllm_compat.apply_patches()


def test_vllm_serves_shuffled_experts_after_an_update_with_their_own_weights(serve, experts_as_shipped):
    served = serve("qwen3-next, with linear attention and experts", "bfloat16")
    assert vllm_weights.differing_tensors(served.model, served.state) == []
    vllm_weights.reload_weights(served.model, served.model_config, served.state)
    differing = vllm_weights.differing_tensors(served.model, served.state)
    assert differing == sorted(name for name in served.state if ".mlp.experts." in name)


def test_with_the_patch_it_serves_what_was_sent(serve, experts_are_packed):
    served = serve("qwen3-next, with linear attention and experts", "bfloat16")
    for seed in (1, 2):
        update = moved(served.state, seed)
        vllm_weights.reload_weights(served.model, served.model_config, update)
        assert vllm_weights.differing_tensors(served.model, update) == []


WIDTH, CHANNELS, MOST_DRAFTED = 3, 5, 4


@pytest.fixture
def gdn(vllm_process, monkeypatch):
    """vLLM's linear attention on a CPU as shipped, without its recurrence: a step returns what it convolves."""
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as gdn

    monkeypatch.setattr(gdn, "_spec_forward", inspect.unwrap(gdn._spec_forward))
    recurrence = "fused_sigmoid_gating_delta_rule_update_spec_cpu"
    monkeypatch.setattr(gdn.ops, recurrence, lambda *, q, **rest: q, raising=False)
    return gdn


def gates(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_rows, 2), torch.zeros(num_rows, 2)


def convolve_while_drafting(gdn, lengths: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of R requests with lengths[step][request] draft tokens, some of them accepted.

    Returns what vLLM convolves, and the same convolution of each token with all that came before it: both [N, D].
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight, num = random(CHANNELS, WIDTH), len(lengths[0])
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(weight=weight, bias=None), activation="silu", A_log=None, dt_bias=None,
        rearrange_mixed_qkv=lambda rows: (rows[None],) * 3,
    )  # fmt: skip
    inputs = torch.full((num + 1, CHANNELS, WIDTH - 1 + MOST_DRAFTED), torch.nan)
    texts = [random(WIDTH - 1, CHANNELS) for _ in range(num)]
    slots = torch.arange(1, num + 1)[:, None].repeat(1, MOST_DRAFTED + 1)
    for slot, text in enumerate(texts, 1):
        inputs[slot, :, : WIDTH - 1] = text.t()  # as the prompt leaves it: the last of it counts as one accepted token
    accepted, found, expected = torch.ones(num, dtype=torch.int32), [], []
    for drafted in lengths:
        rows = [random(1 + n, CHANNELS) for n in drafted]
        starts = torch.tensor([0, *np.cumsum([1 + n for n in drafted]).tolist()], dtype=torch.int32)
        metadata = SimpleNamespace(
            num_spec_decodes=num, spec_state_indices_tensor=slots, spec_query_start_loc=starts,
            num_accepted_tokens=accepted,
        )  # fmt: skip
        found.append(
            gdn._spec_forward(
                layer, metadata, torch.cat(rows), *gates(starts[-1]), inputs, None, WIDTH, WIDTH - 1 + MOST_DRAFTED
            )
        )
        for i, own in enumerate(rows):
            text = torch.cat([texts[i][-(WIDTH - 1) :], own])
            sums = [(text[at : at + WIDTH].t() * weight).sum(1) for at in range(len(own))]
            expected.append(torch.nn.functional.silu(torch.stack(sums)))
        accepted = torch.tensor([int(torch.randint(1, n + 2, (), generator=generator)) for n in drafted])
        texts = [torch.cat([t, own[:n]]) for t, own, n in zip(texts, rows, accepted.tolist(), strict=True)]
    return torch.cat(found), torch.cat(expected)


FULL_LENGTH = [[MOST_DRAFTED] * 3] * 4
SHORTER = [[1, 0, 2], [1, 0, 2], [1, 0, 1]]
ANY_LENGTH = [[4, 4, 4], [0, 2, 4], [1, 1, 1], [4, 0, 3], [4, 4, 4], [2, 0, 0]]


def test_vllm_convolves_rejected_tokens_after_a_step_with_fewer_drafts(gdn):
    found, expected = convolve_while_drafting(gdn, FULL_LENGTH)
    torch.testing.assert_close(found, expected)
    found, expected = convolve_while_drafting(gdn, SHORTER)
    assert not torch.allclose(found, expected)
    with pytest.raises(RuntimeError, match="size"):
        convolve_while_drafting(gdn, ANY_LENGTH)


def test_with_the_patch_it_convolves_what_came_before(gdn):
    vllm_compat.apply(vllm_compat.pad_short_drafts)
    for lengths in (FULL_LENGTH, SHORTER, ANY_LENGTH):
        found, expected = convolve_while_drafting(gdn, lengths)
        torch.testing.assert_close(found, expected)
