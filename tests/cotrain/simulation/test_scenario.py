"""A system as a file describes it, and both of its arms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotrain.config.errors import ConfigError, validated
from cotrain.simulation.roofline import Roofline, entries
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import WorkloadConfig, load_system

CONFIGS = Path(__file__).parents[3] / "configs" / "simulate"
CELLS = [[k, n, 20 + 4 * k + 0.4 * n * (k + 1)] for k in (0, 1, 3) for n in (1, 8, 32)]
GROUPS = [[[40 + 31 * (7 * prompt + 3 * sample) % 400 for sample in range(4)] for prompt in range(12)]]
TABLE: dict[str, Any] = {
    "system": {"engines": 3, "max_num_seqs": 16},
    "cost": {"type": "cells", "cells": CELLS},
    "workload": {"groups": GROUPS},
    "drafter": {"accept": [0.8, 0.6, 0.4], "k": 3},
}


def scenario(*overrides: str) -> Scenario:
    return Scenario(load_system(TABLE, overrides))


def paper(*overrides: str) -> Scenario:
    return Scenario(load_system([CONFIGS / "paper_8b.toml"], overrides))


def problems(base: Any, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_system(base, overrides)
    return caught.value.problems


def test_without_draft_tokens_nothing_changes() -> None:
    for nothing in ("drafter.k=0", "drafter=none"):
        assert scenario(nothing).generation == scenario().plain.generation and scenario(nothing).speedup == 1


def test_speculation_gains_no_more_than_its_acceptance_length() -> None:
    assert 1 < scenario().speedup < scenario().acceptance.length(3) < 3.0
    assert scenario("drafter.accept=[0.0]").speedup < 1


def test_the_slowest_engine_counts_and_each_step() -> None:
    """All cells are 10 ms: an engine takes its tokens one after another."""
    flat = ["cost.cells=[[0, 1, 10]]", "system.engines=2", "system.max_num_seqs=1", "drafter=none"]
    one, other = [[20, 10], [5, 5], [1]], [[7], [9]]
    for steps, seconds in (([one], 0.31), ([other], 0.09), ([one, other], 0.20)):
        assert scenario(*flat, f"workload.groups={steps}", "workload.prompt_tokens=0").generation == pytest.approx(
            seconds
        )


def test_a_step_with_lag_takes_the_longer_of_both_sides() -> None:
    generation = scenario().generation
    for learning in (1.5 * generation, 0.2 * generation):
        learner = f"system.learner_seconds={learning}"
        assert scenario(learner).step() == pytest.approx(generation + learning)
        assert scenario(learner, "system.lag=1").step() == pytest.approx(max(generation, learning))


def test_drafter_training_that_a_step_waits_for_is_paid_by_the_arm_alone() -> None:
    free, paid = scenario(), scenario("drafter.training_seconds=2.0")
    assert paid.plain.step() == free.plain.step() and paid.step() == pytest.approx(free.step() + 2.0)


def test_adaptive_lengths_are_never_slower_than_a_fixed_one() -> None:
    for make in (scenario, paper):
        fixed = [make(f"drafter.k={k}").generation for k in range(8)]
        assert make("drafter.k=7", "drafter.adaptive=true").generation <= min(fixed) * 1.001 < fixed[0]


@pytest.mark.parametrize(
    ("overrides", "envelope"),
    [
        (["system.engines=8", "drafter.k=2"], False),
        (["drafter.k=7"], True),
        (["cost.drafted_k=[3]", "drafter.k=5"], True),
        (["cost.drafted_k=[]"], True),
        (["cost.drafted_k=[]", "drafter.adaptive=true", "drafter.accept=[0.01]"], True),
        (["cost.drafted_k=[]", "drafter=none"], False),
    ],
)
def test_a_roofline_is_an_envelope_beyond_the_drafts_it_was_adjusted_to(overrides: list[str], envelope: bool) -> None:
    assert paper(*overrides).envelope == envelope and not scenario().envelope


def test_another_system_than_was_measured_is_refused_until_it_says_so() -> None:
    [line] = problems([CONFIGS / "paper_8b.toml"], "cost.gpu=h100-sxm", "cost.drafter=mtp")
    assert line.startswith("cost.drafter, cost.gpu: cost.drafted_k was measured with another; give cost.drafted_k=[]")
    other = paper("cost.gpu=h100-sxm", "cost.drafted_k=[]", "cost.engine=vllm-2026")
    assert other.envelope and other.generation > paper().generation


H100_NODE = CONFIGS / "h100_node.toml"
OWN = """
[cost]
gpu = "a100-sxm"
model = "Own-7B"
drafter = "Own-1B"
[cost.gpus.a100-sxm]
memory_bytes = 80e9
memory_bandwidth = 2.0e12
flops = 312e12
source = "data sheet"
"""
SHAPES = {"Own-7B": (28, 3584, 28, 4, 18944), "Own-1B": (16, 2048, 16, 8, 6144)}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A GPU, a policy and a small draft model that no data file holds."""
    path, names = tmp_path / "own.toml", ("layers", "hidden", "heads", "kv_heads", "intermediate")
    text = OWN
    for model, shape in SHAPES.items():
        fields = dict(zip(names, shape, strict=True)) | {"head_dim": 128, "vocabulary": 152064}
        text += f"[cost.models.{model}]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())
        text += 'source = "config.json"\n'
    path.write_text(text)
    return path


def test_a_gpu_a_policy_and_a_draft_model_are_described_in_the_file(own: Path) -> None:
    given = Scenario(load_system([H100_NODE, own])).cost
    assert isinstance(given, Roofline)
    assert given.hardware.memory_bandwidth == 2e12 and given.hardware.layer_s == entries("gpus")["h100-sxm"].layer_s
    assert given.model.hidden == 3584 and given.drafter == replace(given.model, layers=16, hidden=2048, heads=16,
                                                                  kv_heads=8, intermediate=6144)  # fmt: skip
    known = Scenario(load_system([H100_NODE, own], ["cost.gpu=h100-sxm", "cost.model=Qwen/Qwen2.5-7B"]))
    assert known.generation < Scenario(load_system([H100_NODE, own])).generation


def test_a_draft_model_costs_its_passes() -> None:
    """Qwen3-1.7B reads 3.4 GB for each draft token, an EAGLE-3 head 0.8 GB."""
    steps = {}
    for drafter in ("eagle3", "Qwen/Qwen3-1.7B"):
        s = Scenario(load_system([H100_NODE], [f"cost.drafter={drafter}", "cost.host_draft_ms=0"]))
        steps[drafter] = float((s.step_time(3) - s.step_time(0))[0])
    assert steps["Qwen/Qwen3-1.7B"] > 3 * 3.4e9 / 3.35e12 > steps["eagle3"] > 3 * 0.76e9 / 3.35e12


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "cost.drafter=eagle",
            "cost.drafter: 'eagle' is not known: give one of eagle3, mtp, dflash, dspark, Qwen3-1.7B",
        ),
        ("cost.engine=vllm-2024", "cost.engine: 'vllm-2024' is not known: give one of vllm-2025"),
        ("cost.gpus.mine.memory_bytes=80e9", "cost.gpus.mine.memory_bandwidth: "),
        (
            "cost.gpus.mine={memory_bytes=80e9, memory_bandwidth=0, flops=1e15, source='s'}",
            "cost.gpus.mine.memory_bandw",
        ),
        ("cost.models.mine.hiden=1", "cost.models.mine.hiden: "),
        ("cost.async_scheduling=some", "cost.async_scheduling: must be 'always', 'without_drafts' or 'never'"),
    ],
)
def test_what_is_not_known_is_named(override: str, line: str) -> None:
    found = problems([H100_NODE], override)
    assert any(each.startswith(line) for each in found), found


def test_an_engines_version_decides_the_hosts_times_unless_they_are_given() -> None:
    def gain(*overrides: str) -> float:
        return Scenario(load_system([H100_NODE], overrides)).speedup

    assert gain("cost.engine=vllm-2025-eagle3") < gain("cost.engine=vllm-2025") < gain()
    same = ["cost.host_draft_ms=0.145", "cost.async_scheduling=always", "cost.host_step_ms=1.2"]
    assert gain("cost.engine=vllm-2025", *same) == gain()
    assert gain("cost.async_scheduling=without_drafts") < gain(), "the arm without speculation has it, the other not"


CELLS_FILE = """
[cost]
type = "roofline"
gpu = "h100-sxm"
cells = [[0, 1, 7.5], [0, 64, 11.0], [3, 1, 9.0], [3, 1, 9.4], [3, 1, 90.0], [3, 64, 18.0]]
cells_context = 1000
cells_source = "cotrain bench, H100, vLLM 0.32"
"""


def test_a_file_of_measured_steps_replaces_the_prediction_and_ends_the_envelope(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(CELLS_FILE)
    s = Scenario(load_system([H100_NODE, path]))
    assert Scenario(load_system([H100_NODE])).envelope and not s.envelope and not s.extrapolated
    assert s.changed("drafter", k=4).envelope, "longer drafts than measured"
    assert s.changed("system", engines=4).extrapolated[0] == 65, "larger batches than measured"
    read = s.cost.slope(3) * 1000
    assert s.cost.base(3, np.array([1.0])) + read == pytest.approx(9.4e-3), "the median of three"
    [line] = problems([H100_NODE, path], "cost.engine=vllm-2025", "cost.gpu=h200-sxm")
    assert line.startswith("cost.engine, cost.gpu: cost.cells was measured with another; give cost.cells=[]")
    assert Scenario(load_system([H100_NODE, path], ["cost.gpu=h200-sxm", "cost.cells=[]"])).envelope


def test_all_problems_come_at_once_and_name_the_field() -> None:
    wrong = ["cost.gpu=gb20", "cost.model=Qwen/Qwen3-9B", "drafter.accept=[0.5, 0.6]", "workload.mean_length=none"]
    found = problems([CONFIGS / "paper_8b.toml"], *wrong, "system.slots=2")
    assert sorted(line.split(":")[0] for line in found) == [
        *("cost.gpu", "cost.model", "drafter", "system.slots", "workload"),
    ]
    text = "\n".join(found)
    for part in ("did you mean gb200?", "Llama-3.1-8B", "never rising", "give mean_length", "unknown field"):
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["workload.sigma=0.5", "workload.responses=8"],
            "workload: responses, sigma would have no effect beside groups",
        ),
        (["cost.gpu=gb200"], "cost.gpu: unknown field"),
        (["drafter.acceptance_length=[2.0, 3]"], "drafter: give either accept, and by_depth"),
        (["drafter.accept=none"], "drafter: give either accept, and by_depth"),
        (["cost.cells=[[0, 0, 1.0], [0, 1, 0]]"], "cost.cells: must"),
        (["cost.cells=[]"], "cost.cells: "),
    ],
)
def test_fields_that_do_not_go_together_are_refused(overrides: list[str], line: str) -> None:
    assert problems(TABLE, *overrides)[0].startswith(line)


def test_weights_that_do_not_fit_are_refused_with_the_fix() -> None:
    large = ["cost.model=Qwen3-235B-A22B", "cost.drafted_k=[]"]
    [line] = problems([CONFIGS / "paper_8b.toml"], *large)
    assert line.startswith("cost: a GPU has 469 GB of weights, more than a gb200 holds; raise tensor_parallel")
    assert paper(*large, "cost.tensor_parallel=8").generation > 0


def test_a_cell_that_was_measured_again_is_its_median_and_what_lies_beyond_is_known() -> None:
    again = scenario("cost.cells=[[0, 1, 10], [0, 1, 90], [0, 1, 12], [3, 1, 14]]", "system.max_num_seqs=2")
    assert again.cost.base(0, np.ones(1)) == pytest.approx(12e-3)
    assert again.extrapolated == [2] and scenario().extrapolated == []


def test_drawn_lengths_have_the_stated_mean_and_spread_and_follow_the_seed() -> None:
    work = validated(WorkloadConfig, {"responses": 20_000, "mean_length": 5000, "sigma": 0.8, "limit": 10**9})
    [step], other = work.lengths(), work.lengths(1)
    lengths = np.ravel(step)
    assert lengths.mean() == pytest.approx(5000, rel=0.03) and np.log(lengths).std() == pytest.approx(0.8, rel=0.02)
    assert work.lengths() == [step] != other
    assert np.max(validated(WorkloadConfig, {"mean_length": 5000, "limit": 300}).lengths()) == 300
