"""A system as a file describes it, and both of its arms."""

from typing import Any

import numpy as np
import pytest

from cotrain.config.errors import ConfigError, validated
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.system import WorkloadConfig, load_system

CELLS = [[k, n, 20 + 4 * k + 0.4 * n * (k + 1)] for k in (0, 1, 3) for n in (1, 8, 32)]
GROUPS = [[[40 + 31 * (7 * prompt + 3 * sample) % 400 for sample in range(4)] for prompt in range(12)]]
TABLE: dict[str, Any] = {
    "system": {"engines": 3, "max_num_seqs": 16},
    "cost": {"cells": CELLS},
    "workload": {"groups": GROUPS},
    "drafter": {"accept": [0.8, 0.6, 0.4], "k": 3},
}


def scenario(*overrides: str) -> Scenario:
    return Scenario(load_system(TABLE, overrides))


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
    fixed = [scenario(f"drafter.k={k}").generation for k in range(8)]
    assert scenario("drafter.k=7", "drafter.adaptive=true").generation <= min(fixed) * 1.001 < fixed[0]


def test_all_problems_come_at_once_and_name_the_field() -> None:
    wrong = ["cost.type=roofline", "drafter.accept=[0.5, 0.6]", "workload.groups=[]", "system.slots=2"]
    found = problems(TABLE, *wrong)
    assert sorted(line.split(":")[0] for line in found) == [
        *("cost.cells", "cost.type", "drafter", "system.slots", "workload"),
    ]
    text = "\n".join(found)
    for part in ("must be 'cells'", "never rising", "give mean_length", "unknown field"):
        assert part in text


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["workload.sigma=0.5", "workload.responses=8"],
            "workload: responses, sigma would have no effect beside groups",
        ),
        (["cost.gpu=gb200"], "cost.gpu: unknown field"),
        (["drafter.acceptance_length=[2.0, 3]"], "drafter.acceptance_length: unknown field"),
        (["cost.cells=[[0, 0, 1.0], [0, 1, 0]]"], "cost.cells: must"),
        (["cost.cells=[]"], "cost.cells: "),
    ],
)
def test_fields_that_do_not_go_together_are_refused(overrides: list[str], line: str) -> None:
    assert problems(TABLE, *overrides)[0].startswith(line)


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
