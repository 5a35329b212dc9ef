"""The roofline: its limits, what must not make a step slower, and its data. Figures of real systems: test_validation.py."""

from dataclasses import replace

import numpy as np
import pytest

from cotrain.config.errors import validated
from cotrain.simulation.roofline import CalibratedRoofline, Engine, Hardware, Model, Roofline, entries
from cotrain.simulation.system import RooflineCost

GPUS, MODELS = entries("gpus"), entries("models")
H100, GB200, SMALL = GPUS["h100-sxm"], GPUS["gb200"], MODELS["Qwen3-8B"]
BATCH = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
ENGINE = Engine(1.2e-3, 0.4e-3, "never", "a test")


def roofline(
    gpu: Hardware = H100, policy: Model = SMALL, kind: str = "eagle3", engine: Engine = ENGINE, **fields: float
) -> Roofline:
    return Roofline(gpu, policy, policy.drafter(kind), engine, **fields)


@pytest.mark.parametrize("policy", [SMALL, MODELS["Qwen3-30B-A3B"]], ids=["dense", "experts"])
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_step_is_never_faster_than_the_data_sheet_allows(gpu: Hardware, policy: Model) -> None:
    """Weights that are read once, operations of all rows, the cache of the context; and it is not slow without a cause."""
    cost, tokens = roofline(gpu, policy), 1000.0 * BATCH
    active = policy.parameters(policy.experts_per_token)
    for k in (0, 3):
        step = cost.base(k, BATCH) + cost.slope(k) * tokens
        moving = (2 * active + policy.kv_bytes * tokens) / gpu.memory_bandwidth
        computing = 2 * active * BATCH * (k + 1) / gpu.flops
        assert (step > np.maximum(moving, computing)).all()
    assert 1 < cost.prefill(8192) / (2 * active * 8192 / gpu.flops) < 3
    assert cost.base(0, BATCH)[0] < 1.6 * (2 * active / gpu.memory_bandwidth) + 5e-3


def test_where_only_the_host_takes_time_the_ratio_follows_from_its_two_constants() -> None:
    cost = roofline(engine=Engine(4000.0, 1500.0, "never", "a test"))
    for k in (1, 3, 7):
        assert cost.base(k, BATCH) / cost.base(0, BATCH) == pytest.approx(1 + k * 1500 / 4000, rel=1e-4)


def test_a_block_drafter_is_run_once_whatever_the_draft_length() -> None:
    host, block = Engine(0.0, 1500.0, "never", "a test"), SMALL.drafter("dflash")
    cost = roofline(kind="dflash", engine=host)
    assert [float(cost.base(k, BATCH)[0]) for k in (1, 3, 7)] == pytest.approx([1500.0] * 3, rel=1e-4)
    read = roofline(kind="dflash").slope(7) / roofline().slope(0)
    assert (
        read == pytest.approx(1 + block.kv_bytes / SMALL.kv_bytes)
        and block.kv_bytes == 5 * SMALL.kv_bytes / SMALL.layers
    )
    free = Engine(0.0, 0.0, "never", "a test")
    of_length = {
        k: roofline(kind="dflash", engine=free).base(k, BATCH) - roofline(engine=free).base(0, BATCH) for k in (1, 7)
    }
    assert (of_length[7] > of_length[1]).all() and (of_length[7][:2] < 1.2 * of_length[1][:2]).all()


def test_asynchronous_scheduling_hides_the_shorter_of_host_and_gpu() -> None:
    """The draft passes wait for the host even then."""
    free = {k: roofline(engine=replace(ENGINE, host_step_s=0.0)).base(k, BATCH) for k in (0, 3)}
    for scheduling, hidden in (("always", (0, 3)), ("without_drafts", (0,)), ("never", ())):
        for seconds in (1.2e-3, 50.0):
            cost = roofline(engine=Engine(seconds, ENGINE.host_draft_s, scheduling, "a test"))  # type: ignore[arg-type]
            for k in (0, 3):
                expected = np.maximum(free[k], seconds) if k in hidden else free[k] + seconds
                assert cost.base(k, BATCH) == pytest.approx(expected)
    unloaded = roofline(engine=replace(ENGINE, host_step_s=0.0, host_draft_s=0.0))
    assert free[3] - unloaded.base(3, BATCH) == pytest.approx(3 * ENGINE.host_draft_s)


def test_more_bandwidth_is_never_slower_and_drafts_never_free() -> None:
    wide = roofline(replace(H100, memory_bandwidth=2 * H100.memory_bandwidth))
    for k in (0, 3):
        assert (wide.base(k, BATCH) < roofline().base(k, BATCH)).all() and wide.slope(k) < roofline().slope(k)
    assert (roofline().base(3, BATCH) > roofline().base(0, BATCH) + 3 * ENGINE.host_draft_s).all()
    assert roofline().slope(3) > roofline().slope(0)


def test_steps_of_more_rows_than_were_captured_take_what_the_host_needs_to_start_each_operation() -> None:
    free, captured = roofline(GB200), roofline(GB200, graph_tokens=128)
    inside, outside = np.array([1.0, 16.0, 32.0]), np.array([33.0, 64.0])
    assert (captured.base(3, inside) == free.base(3, inside)).all()
    eager = SMALL.layers * GB200.eager_layer_s + ENGINE.host_step_s
    assert (free.base(3, outside) < eager).all()
    assert captured.base(3, outside) == pytest.approx(eager + 3 * (2 * GB200.eager_layer_s + ENGINE.host_draft_s))


def test_tensor_parallel_splits_weights_and_cache_and_pays_for_all_reduces() -> None:
    policy = MODELS["Qwen3-32B"]
    steps = [float(roofline(H100, policy, tensor_parallel=gpus).base(0, BATCH)[1]) for gpus in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] / 8 < steps[3] and steps[0] / steps[1] < 2
    few_heads = MODELS["Qwen3-30B-A3B"]  # four key heads: from 4 GPUs on each holds a copy
    slopes = [roofline(H100, few_heads, tensor_parallel=gpus).slope(0) for gpus in (1, 4, 8)]
    assert slopes[0] == pytest.approx(4 * slopes[1]) and slopes[1] == slopes[2]


def test_shapes_are_those_that_the_models_cards_state() -> None:
    """Billions of parameters, with an embedding that is its own unless tied."""
    stated = {"Qwen3-1.7B": 1.7, "Qwen3-8B": 8.2, "Qwen3-32B": 32.8, "Qwen2.5-7B": 7.6, "Llama-3.1-8B": 8.03,
              "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235}  # fmt: skip
    assert stated.keys() == MODELS.keys()
    for name, billions in stated.items():
        m = MODELS[name]
        embedding = m.vocabulary * m.hidden * (name != "Qwen3-1.7B")
        assert (m.parameters(m.experts) + embedding) / 1e9 == pytest.approx(billions, rel=0.015), name
    assert SMALL.kv_bytes == 147_456 and SMALL.drafter("eagle3").parameters(1) / 1e9 == pytest.approx(0.38, abs=0.01)


def test_every_entry_has_a_source_and_no_efficiency_above_one() -> None:
    for gpu in GPUS.values():
        assert "data sheet" in gpu.source and "AIConfigurator" in gpu.source
        assert max(gpu.bandwidth_efficiency, gpu.flops_efficiency, gpu.attention_efficiency) <= 1
    assert all("/" in policy.source for policy in MODELS.values())
    assert all(engine.source for engine in entries("engines").values())


def test_a_gpu_of_which_only_the_data_sheet_is_known_is_as_efficient_as_an_h100() -> None:
    sheet = Hardware(H100.memory_bytes, H100.memory_bandwidth, H100.flops, H100.source)
    assert sheet == H100


def test_weights_of_one_byte_are_read_in_half_the_time() -> None:
    """At one request, where nearly nothing else counts but launches."""
    policy, gpu = MODELS["Qwen3-32B"], replace(H100, layer_s=0.0)
    half = roofline(gpu, replace(policy, weight_bytes=1.0), engine=replace(ENGINE, host_step_s=0.0))
    full = roofline(gpu, policy, engine=replace(ENGINE, host_step_s=0.0))
    assert half.base(0, np.ones(1)) == pytest.approx(full.base(0, np.ones(1)) / 2, rel=0.01)
    assert half.drafter.weight_bytes == full.drafter.weight_bytes == 2, "drafters are in bf16"


MEASURED = {(0, 4): 9e-3, (0, 64): 13e-3, (3, 4): 12e-3, (3, 64): 22e-3}


def test_measured_steps_take_the_place_of_the_rooflines_at_their_context() -> None:
    given, cost = roofline(), CalibratedRoofline(roofline(), MEASURED, context=500)
    for (k, batch), seconds in MEASURED.items():
        at = np.array([float(batch)])
        assert cost.base(k, at) + cost.slope(k) * batch * 500 == pytest.approx(seconds)
    assert cost.slope(3) == given.slope(3) and cost.prefill(100) == given.prefill(100)


def test_beyond_measured_steps_the_roofline_goes_on_from_them() -> None:
    given, cost = roofline(), CalibratedRoofline(roofline(), MEASURED, context=0)
    ratio = {cell: seconds / given.base(cell[0], np.array([float(cell[1])]))[0] for cell, seconds in MEASURED.items()}
    for k, batch, expected in (
        (0, 1.0, ratio[0, 4]),
        (3, 256.0, ratio[3, 64]),
        (5, 256.0, ratio[3, 64]),
        (0, 16.0, (ratio[0, 4] + ratio[0, 64]) / 2),
        (1, 4.0, (2 * ratio[0, 4] + ratio[3, 4]) / 3),
    ):
        assert cost.base(k, np.array([batch])) / given.base(k, np.array([batch])) == pytest.approx(expected)


def test_measured_drafts_alone_leave_steps_without_drafts_as_they_were() -> None:
    given = roofline()
    cost = CalibratedRoofline(given, {(3, 16): 2 * given.base(3, np.array([16.0]))[0]}, context=0)
    assert (cost.base(0, BATCH) == given.base(0, BATCH)).all()
    assert cost.base(3, BATCH) == pytest.approx(2 * given.base(3, BATCH))


def test_noise_in_measured_steps_makes_no_draft_cheaper_than_none() -> None:
    noisy = CalibratedRoofline(roofline(), MEASURED | {(2, 4): 7e-3}, context=0)
    times = [noisy.base(k, np.array([4.0]))[0] for k in range(6)]
    assert times == sorted(times) and times[2] == pytest.approx(7e-3)


def test_a_measured_step_that_is_too_short_for_its_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cost\.cells: 9 ms are too few to read the context of 4; .* 200000"):
        CalibratedRoofline(roofline(), MEASURED, context=200_000)


def test_names_are_those_of_the_hub_or_answered_with_the_known_ones() -> None:
    for name in ("Qwen/Qwen3-8B", "Qwen3-8B"):
        assert validated(RooflineCost, {"type": "roofline", "gpu": "gb200", "model": name}).model == "Qwen3-8B"
    with pytest.raises(
        ValueError, match=r"'Qwen/Qwen3-9B' is not known.*Llama-3\.1-8B.*\[cost\.models\.NAME\]; did you mean"
    ):
        validated(RooflineCost, {"type": "roofline", "gpu": "gb200", "model": "Qwen/Qwen3-9B"})
