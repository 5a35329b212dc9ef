"""A run's folder as the base of a simulation: what is read from it, what may be changed, and whether it predicts itself.

The runs are planted: what their steps cost and accept is known.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.simulator_run import compared
from cotrain.run.rows import read_rows
from cotrain.simulation.scenario import Scenario
from cotrain.simulation.step_time import MeasuredCells
from pipelines.simulate.run_base import recorded, run_system, step_times
from tests.pipelines.simulate.planted_run import (
    AROUND,
    EARLY,
    LATE,
    OTHER,
    PREFILL_TOKENS_PER_S,
    PROMPT_TOKENS,
    K,
    measured_generation,
    seconds_of,
    write_run,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One with a drafter, one without; the same with other settings."""
    root = tmp_path_factory.mktemp("runs")
    settings: dict[str, dict[str, Any]] = {"spec": {}, "plain": {"k": 0}, "wide": {"slots": 16}, "two": {"engines": 2}}
    return {name: write_run(root / name, **fields) for name, fields in settings.items()}


def test_what_steps_cost_and_accept_is_read_back(runs: dict[str, Path]) -> None:
    cells, prefill = step_times(recorded(runs["spec"]))
    assert {(0, 1), (1, 4), (2, 8), (2, 5)} <= cells.keys(), "also what the engine only tried"
    for (k, batch), seconds in cells.items():
        assert seconds == pytest.approx(seconds_of(k, batch), rel=0.04)
    assert prefill == pytest.approx(PREFILL_TOKENS_PER_S, rel=0.05)
    system = run_system(runs["spec"])
    assert system.drafter and system.drafter.training_seconds == pytest.approx(0.4)
    by_depth = dict(system.drafter.by_depth)
    assert by_depth[0] == pytest.approx(np.cumprod(EARLY), abs=0.03)
    assert by_depth[128] == pytest.approx(np.cumprod(LATE), abs=0.03)
    assert system.workload.prompt_tokens == PROMPT_TOKENS and len(system.workload.groups) == 8
    assert system.system.learner_seconds == pytest.approx(1.5 + 0.1 + OTHER + AROUND, abs=1e-6)
    cost = Scenario(system).cost
    assert isinstance(cost, MeasuredCells)
    assert cost.covers(K, 8) and not cost.covers(K, 9) and not cost.covers(K + 1, 4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("wide", ["system.max_num_seqs=16"]), ("two", ["system.engines=2"]), ("plain", ["drafter.k=0"])],
)
def test_other_settings_are_predicted(runs: dict[str, Path], name: str, changes: list[str]) -> None:
    """Against a run that was made with them."""
    before, after = (Scenario(run_system(runs["spec"], change)).generation + AROUND for change in ([], changes))
    measured = measured_generation(runs["spec"]) / measured_generation(runs[name])
    assert before / after == pytest.approx(measured, rel=0.03)


def test_settings_go_by_the_names_of_a_system(runs: dict[str, Path]) -> None:
    system = run_system(runs["spec"], ["drafter.k=1", "drafter.adaptive=false", "system.lag=1"])
    assert system.drafter and (system.drafter.k, system.system.lag) == (1, 1)
    with pytest.raises(ValueError, match="rollout: unknown field"):
        run_system(runs["spec"], ["rollout.temperature=0.5"])
    better = run_system(runs["spec"], ["drafter.accept=[0.99, 0.98]"])
    assert Scenario(better).generation < 0.9 * Scenario(run_system(runs["spec"])).generation, "at every depth"


@pytest.mark.parametrize("name", ["spec", "plain", "two", "wide"])
def test_half_of_a_run_predicts_the_other(runs: dict[str, Path], name: str) -> None:
    predicted, measured = compared(runs[name])
    assert predicted == pytest.approx(measured, rel=0.04), "the steps that only try a length are not predicted"


def copied(run: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run in which each row of steps.jsonl and metrics.jsonl was changed."""
    shutil.copytree(run, to)
    for name in ("steps", "metrics"):
        rows = read_rows(to / f"{name}.jsonl")
        for row in rows:
            change(row)
        (to / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return to


def slow_generation(row: dict[str, Any]) -> None:
    """Steps 3, 4, 7, 8 and so on were generated on a machine that is slower by half."""
    if (row["step"] - 1) % 4 > 1 and "engines" in row:
        row["engines"] = {"0": [[*rest, 1.5 * seconds] for *rest, seconds in row["engines"]["0"]]}


def cheap_drafts(row: dict[str, Any]) -> None:
    """Nothing was ever accepted, and yet steps with drafts took less time than those without."""
    if "engines" in row:
        row["engines"] = {e: [[k, *rest, s * 0.7**k] for k, *rest, s in ts] for e, ts in row["engines"].items()}
    if "acceptance" in row:
        row["acceptance"] = [[depth, drafted, 0, n] for depth, drafted, _, n in row["acceptance"]]


def test_a_run_that_is_not_predicted_is_off(runs: dict[str, Path], tmp_path: Path) -> None:
    predicted, measured = compared(copied(runs["spec"], tmp_path / "slow", slow_generation))
    assert predicted / measured == pytest.approx(1 / 1.5, rel=0.03)


def test_noise_in_step_times_gains_nothing_where_nothing_is_accepted(runs: dict[str, Path], tmp_path: Path) -> None:
    noisy = copied(runs["spec"], tmp_path / "noisy", cheap_drafts)
    for k in (1, 2, 3):
        assert Scenario(run_system(noisy, [f"drafter.k={k}", "drafter.adaptive=false"])).speedup <= 1 + 1e-12


def drafting_alone(row: dict[str, Any]) -> None:
    """As if the engines always drafted."""
    if "engines" in row:
        row["engines"] = {e: [step for step in steps if step[0] == K] for e, steps in row["engines"].items()}


def test_a_run_tells_nothing_of_draft_lengths_that_it_never_had(runs: dict[str, Path], tmp_path: Path) -> None:
    fixed = copied(runs["spec"], tmp_path / "fixed", drafting_alone)
    with pytest.raises(ValueError, match=r"k = \[2\] tell nothing of k = 0: give cost\.cells .*adaptive=true"):
        assert Scenario(run_system(fixed, ["drafter.adaptive=false"])).speedup
    cells = f"cost.cells={[[k, n, 10.0 + k] for k in (0, 2) for n in (1, 8)]}"
    assert Scenario(run_system(fixed, [cells])).speedup > 1
    with pytest.raises(ValueError, match="tell nothing of k = 2"):
        assert Scenario(run_system(runs["plain"], ["drafter.k=2", "drafter.accept=[0.7, 0.5]"])).generation


@pytest.mark.parametrize("name", ["steps", "stream", "metrics"])
def test_the_file_that_a_run_lacks_is_named(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    old = Path(shutil.copytree(runs["spec"], tmp_path / "old"))
    path = old / f"{name}.jsonl"
    damaged = path.read_text().replace("\n", "\n{]\n", 1)
    for text, said in ((damaged, "a line is not valid JSON .*remove that line"), ("", "it is missing .*run it again")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"old/{name}\.jsonl: {said}"):
            run_system(old)


def test_what_a_run_cannot_answer_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    old = Path(shutil.copytree(runs["spec"], tmp_path / "old"))
    with (old / "stream.jsonl").open("a") as file:  # what its engine did until it died is not in the record
        file.write(json.dumps({"step": 3, "event": "lost", "group": 24, "engine": 0}) + "\n")
    assert sorted(recorded(old).times["step"]) == [1, 2, 4, 5, 6, 7, 8]
    (old / "metrics.jsonl").write_text('{"step": 99, "time/step_s": 1.0}\n')
    with pytest.raises(ValueError, match=r"old: no step is whole in steps\.jsonl, stream\.jsonl and metrics\.jsonl"):
        run_system(old)
    history: dict[str, Any] = {"history": {}}
    suffix = write_run(tmp_path / "suffix", steps=1, drafter=None, rollout={"prompts_per_step": 8} | history)
    with pytest.raises(ValueError, match="drafts from history differ in length"):
        recorded(suffix)
    lagging = write_run(tmp_path / "lagging", steps=3, stream={"max_policy_lag": 1})
    assert run_system(lagging).system.lag == 1
    with pytest.raises(ValueError, match=r"with stream\.max_policy_lag above 0"):
        compared(lagging)
    with pytest.raises(ValueError, match="3 whole steps are too few"):
        compared(write_run(tmp_path / "short", steps=3))
