"""The roofline: its limits, what must not make a step slower, and what does not fit. Figures of real systems: test_paper.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator_calibration import fit_host, solve
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.roofline import Hardware, Model, Roofline, experts_read, hardware, model
from cotrain.simulation.scenario import Engines, Scenario, generate
from cotrain.simulation.system import WorkloadConfig

SMALL, LARGE = model("Qwen3-8B"), model("Qwen3-235B-A22B")
H100, GB200 = hardware("h100-sxm"), hardware("gb200")
BATCH = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
LENGTHS = np.ravel(WorkloadConfig(prompts=8, samples=8, mean_length=2000, limit=8192).lengths()).tolist()


def eagle(gpu: Hardware = H100, policy: Model = SMALL, tensor_parallel: int = 1, **host: float) -> Roofline:
    return Roofline(replace(gpu, host=replace(gpu.host, **host)), policy, tensor_parallel, policy.drafter())


def seconds(cost: Roofline, k: int, length: float = 1.0, engines: int = 4) -> float:
    acceptance = Acceptance.from_length(length, k) if k else None
    return generate(Scenario(cost, Engines(engines, 64), [[n] for n in LENGTHS], 200, acceptance, k)).seconds


def test_experts_read_begin_at_those_of_one_token_and_end_at_all() -> None:
    read = experts_read(np.array([1.0, 4.0, 16.0, 1e5]), 128, 8)
    assert read[0] == pytest.approx(8) and read[-1] == pytest.approx(128)
    assert read[1] == pytest.approx(29.2, abs=0.5) and read[2] == pytest.approx(82.4, abs=0.5)


@pytest.mark.parametrize("policy", [SMALL, model("Qwen3-30B-A3B")], ids=lambda policy: policy.name)
@pytest.mark.parametrize("gpu", [H100, GB200], ids=lambda gpu: gpu.name)
def test_a_step_is_never_faster_than_the_data_sheet_allows(gpu: Hardware, policy: Model) -> None:
    """Weights that are read once, operations of all rows, the cache of the context."""
    cost, tokens = Roofline(gpu, policy), 1000.0 * BATCH
    read = policy.weight_bytes - policy.vocabulary * policy.hidden * 2
    if policy.experts:
        read *= policy.active_parameters / policy.total_parameters
    for k in (0, 3):
        step = cost.base(k, BATCH) + cost.slope(k) * tokens
        computed = 2 * policy.active_parameters * BATCH * (k + 1)
        assert (step > (read + policy.kv_bytes * tokens) / gpu.memory_bandwidth).all()
        assert (step > computed / gpu.flops["bf16"]).all()
    layers = policy.active_parameters - policy.vocabulary * policy.hidden
    assert cost.prefill(8192) > 2 * layers * 8192 / gpu.flops["bf16"] * (1.2 if policy.experts else 1.0)
    assert cost.prefill(8192) < 2 * layers * 8192 / gpu.flops["bf16"] * (8 if policy.experts else 2)


def test_more_bandwidth_engines_or_acceptance_is_never_slower_where_memory_limits() -> None:
    for k, length in ((0, 1.0), (3, 2.5)):
        wider = [
            seconds(eagle(replace(H100, memory_bandwidth=H100.memory_bandwidth * x)), k, length) for x in (1, 1.5, 2)
        ]
        assert wider == sorted(wider, reverse=True) and wider[0] > wider[-1]
        spread = [seconds(eagle(), k, length, engines) for engines in (1, 2, 4, 8, 16)]
        assert spread == sorted(spread, reverse=True)
    accepted = [seconds(eagle(), 3, length) for length in (1.0, 1.5, 2.5, 3.5, 4.0)]
    assert accepted == sorted(accepted, reverse=True)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_where_only_the_host_takes_time_the_speed_up_follows_from_its_two_constants(k: int) -> None:
    """S = alpha h0 / (h0 + k hd); without hd the machine is as good as infinitely fast, and S is the acceptance length."""
    length = 1 + 0.6 * k
    for draft_s in (0.0, 1500.0):
        cost = eagle(step_s=4000.0, draft_s=draft_s)
        expected = length * 4000 / (4000 + k * draft_s)
        assert seconds(cost, 0) / seconds(cost, k, length) == pytest.approx(expected, rel=5e-3)


def test_without_speculation_the_drafter_costs_nothing() -> None:
    with_, without = eagle(), Roofline(H100, SMALL)
    assert (with_.base(0, BATCH) == without.base(0, BATCH)).all() and with_.slope(0) == without.slope(0)
    assert (with_.base(3, BATCH) > without.base(3, BATCH) + 3 * H100.host.draft_s).all()
    assert with_.slope(3) > without.slope(3)


def test_an_mtp_head_costs_more_than_an_eagle_drafter_because_of_its_vocabulary() -> None:
    mtp = Roofline(H100, SMALL, drafter=SMALL.drafter("mtp"))
    head = (SMALL.vocabulary - 32_000) * SMALL.hidden * 2 / H100.memory_bandwidth
    assert mtp.base(1, BATCH)[0] - eagle().base(1, BATCH)[0] == pytest.approx(head, rel=0.5)


@pytest.mark.parametrize(("kind", "fused"), [("eagle3", 3 * SMALL.hidden**2), ("mtp", 0)])
def test_eagle_fuses_the_aux_layers_in_its_first_pass_alone_and_mtp_in_each(kind: Any, fused: int) -> None:
    plain, drafting = Roofline(H100, SMALL), Roofline(H100, SMALL, drafter=SMALL.drafter(kind))
    one, two = (drafting.base(k, BATCH)[0] - plain.base(k, BATCH)[0] for k in (1, 2))
    first, later = one - H100.host.draft_s, two - one - H100.host.draft_s
    assert first - later == pytest.approx(fused * 2 / H100.memory_bandwidth, rel=0.4, abs=2e-6)


def test_steps_of_more_rows_than_were_captured_take_what_the_host_needs_to_start_each_operation() -> None:
    free, captured = eagle(GB200), eagle(GB200, graph_tokens=128)
    inside, outside = np.array([1.0, 16.0, 32.0]), np.array([33.0, 64.0])
    assert (captured.base(3, inside) == free.base(3, inside)).all()
    eager = SMALL.layers * GB200.host.eager_layer_s + GB200.host.step_s
    drafting = 3 * (2 * GB200.host.eager_layer_s + GB200.host.draft_s)
    assert (free.base(3, outside) < eager).all()
    assert captured.base(3, outside) == pytest.approx(eager + drafting)
    uneven = Roofline(replace(GB200, host=replace(GB200.host, non_uniform=True)), SMALL)
    assert (uneven.base(3, BATCH) >= eager).all()
    assert (uneven.base(0, BATCH) == free.base(0, BATCH)).all()


def test_tensor_parallel_splits_weights_and_cache_and_pays_for_all_reduces() -> None:
    policy = model("Qwen3-32B")
    steps = [float(Roofline(H100, policy, gpus).base(0, np.array([8.0]))[0]) for gpus in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] / 8 < steps[3] and steps[0] / steps[1] < 2
    assert Roofline(H100, policy, 8).slope(0) == pytest.approx(Roofline(H100, policy).slope(0) / 8)
    few_heads = model("Qwen3-30B-A3B")  # four key heads: from 4 GPUs on each holds a copy
    assert Roofline(H100, few_heads, 8).slope(0) == Roofline(H100, few_heads, 4).slope(0)


def test_steps_beyond_the_fitted_products_are_marked() -> None:
    assert eagle().covers(3, 512) and not eagle().covers(3, 513)


def test_weights_and_cache_that_do_not_fit_are_refused_with_the_field_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"Qwen3-235B-A22B .*470 .*of 77 GB.*cost\.tensor_parallel.*cost\.gpu"):
        Roofline(H100, LARGE)
    fits, alone = Roofline(H100, LARGE, 8, LARGE.drafter()), Roofline(H100, LARGE, 8)
    drafter = LARGE.drafter()
    held = alone.kv_tokens() * LARGE.kv_bytes / 4 - drafter.total_parameters * 2 / 8  # four key heads, eight GPUs
    assert fits.kv_tokens() == pytest.approx(held / ((LARGE.kv_bytes + drafter.kv_bytes) / 4), rel=1e-3)
    assert fits.kv_tokens(memory_share=0.95) > fits.kv_tokens()
    with pytest.raises(ValueError, match=r"request of 10000000 tokens does not fit.*room is left for \d+ tokens"):
        fits.kv_tokens(10_000_000)
    with pytest.raises(ValueError, match=r"cost\.tensor_parallel: 3 must divide Qwen3-8B's 32 heads"):
        Roofline(H100, SMALL, 3)


def test_a_constant_of_the_host_is_found_again_from_the_row_that_it_makes() -> None:
    known = eagle(draft_s=0.9e-3)
    plain = seconds(known, 0)

    def speedup(cost: Roofline) -> float:
        return plain / seconds(cost, 3, 3.0)

    found = fit_host(eagle(), "draft_s", speedup, speedup(known))
    assert found.host.draft_s == pytest.approx(0.9e-3, rel=1e-3)
    assert found.host.source == "fitted to a drafted row"
    with pytest.raises(ValueError, match=r"no host\.draft_s from 0 to 0\.02 gives the measured 4: they give"):
        fit_host(eagle(), "draft_s", speedup, 4.0)


def test_a_constant_may_rise_or_fall_with_what_was_measured() -> None:
    assert solve("x", lambda x: x**2, 4.0, 0.0, 5.0) == pytest.approx(2.0, rel=1e-3)
    assert solve("x", lambda x: 1 / x, 0.5, 0.1, 5.0) == pytest.approx(2.0, rel=1e-3)
