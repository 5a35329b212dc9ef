"""A run's folder as the base of a simulation: what is read from it, what may be changed, and whether it predicts itself.

The runs are planted: what their steps cost and accept is known.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotrain.config.errors import ConfigError
from cotrain.run.rows import read_rows
from cotrain.simulation.scenario import answer, generate
from pipelines.simulate.report import speedup
from pipelines.simulate.run_base import cells_of, check_run, compared, prefill_rate, recorded, renamed, run_system
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
    run = recorded(runs["spec"])
    cells = cells_of(run)
    assert {(0, 1), (1, 4), (2, 8), (2, 5)} <= cells.keys(), "those of the run, and what was timed before it"
    for (k, batch), seconds in cells.items():
        assert seconds == pytest.approx(seconds_of(k, batch), rel=0.04)
    assert prefill_rate(run, cells) == pytest.approx(PREFILL_TOKENS_PER_S, rel=0.05)
    system = run_system(runs["spec"])
    drafter = system.drafter
    assert drafter is not None
    by_depth = dict(drafter.by_depth)
    assert by_depth[0] == pytest.approx(np.cumprod(EARLY), abs=0.03)
    assert by_depth[128] == pytest.approx(np.cumprod(LATE), abs=0.03)
    assert 0.001 < drafter.error < 0.03 and 0.0005 < (system.cost.error or 0) < 0.02
    assert system.workload.prompt_tokens == PROMPT_TOKENS
    assert "8 steps of" in system.origins["cost.cells"]


def test_a_noisy_record_predicts_no_gain_above_the_acceptance_length(runs: dict[str, Path], tmp_path: Path) -> None:
    """Steps without drafts were few and slow, so that drafts seem to make steps faster."""
    noisy = copied(runs["spec"], tmp_path / "noisy", slow_without_drafts)
    rejected = run_system(noisy, ["drafter.accept=[0, 0]"]).build()
    assert speedup(rejected) <= 1.0 and all(speedup(replace(rejected, k=k)) <= 1.0 for k in (1, 2))
    assert rejected.adaptive(K).most_drafted == 0
    for k in (1, 2):  # what was measured often counts for more
        assert rejected.cost.base(k, np.array([8.0])) == pytest.approx([seconds_of(k, 8)], rel=0.05)


def test_seconds_beside_the_engines_are_told_apart(runs: dict[str, Path]) -> None:
    with_drafter, without = (run_system(runs[name]).build() for name in ("spec", "plain"))
    for scenario, exposed in ((with_drafter, 0.4), (without, 0.0)):
        assert scenario.learner_seconds == pytest.approx({"update": 1.5, "swap_policy": 0.1, "other": OTHER}, abs=1e-6)
        assert scenario.generation_overhead == pytest.approx(AROUND, abs=1e-6)
        assert scenario.drafter_seconds == pytest.approx(exposed)


def test_what_training_of_the_drafter_brings_is_told_of_runs_that_train_it(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    training = run_system(runs["spec"]).cotraining
    assert training and abs(training.gain) < 0.1 and training.seconds_per_step == pytest.approx(0.4)
    short = copied(runs["spec"], tmp_path / "short", shorter_at_first)
    training = run_system(short).cotraining
    assert training and abs(training.gain) < 0.1, "drafts of the first step are shorter, and accepted as often"
    config = json.loads((short / "config.json").read_text())
    config["drafter"]["train"] = False
    (short / "config.json").write_text(json.dumps(config))
    assert run_system(short).cotraining is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [("wide", ["rollout.vllm.max_num_seqs=16"]), ("two", ["num_engines=2"]), ("plain", ["k=0"])],
)
def test_other_settings_are_predicted(runs: dict[str, Path], name: str, changes: list[str]) -> None:
    """Against a run that was made with them."""
    before, after = (generate(run_system(runs["spec"], change).build()).seconds + AROUND for change in ([], changes))
    assert before / after == pytest.approx(
        measured_generation(runs["spec"]) / measured_generation(runs[name]), rel=0.03
    )


def test_settings_go_by_the_names_of_a_run_or_of_a_system(runs: dict[str, Path]) -> None:
    scenario = run_system(runs["spec"], ["num_speculative_tokens=1", "drafter.adaptive=false", "lag=1"]).build()
    assert (scenario.k, scenario.lag) == (1, 1)
    assert renamed(["learner.lag=2", "workload.limit=64"]) == ["learner.lag=2", "workload.limit=64"]
    with pytest.raises(ConfigError, match=r"rollout\.temperature: how much is accepted and how long"):
        run_system(runs["spec"], ["rollout.temperature=0.5"])


def test_a_run_without_speculation_is_a_base_but_tells_nothing_of_drafts(runs: dict[str, Path]) -> None:
    assert generate(run_system(runs["plain"]).build()).seconds > 0
    with pytest.raises(ValueError, match=r"measured with k = .* tells nothing of k = 2"):
        run_system(runs["plain"], ["k=2", "drafter.accept=[0.7, 0.5]"]).build().cost.base(2, np.array([1.0]))


def test_a_run_that_always_drafts_tells_nothing_of_steps_without_drafts(runs: dict[str, Path], tmp_path: Path) -> None:
    fixed = copied(runs["spec"], tmp_path / "fixed", drafting_alone)
    config = json.loads((fixed / "config.json").read_text())
    config["rollout"]["speculation"]["adaptive"] = False
    (fixed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"k = \[2\], which tells nothing of k = 0: give cost\.cells .*adaptive=true"):
        answer(run_system(fixed).build())
    cells = [[k, n, 10.0 + k] for k in (0, 2) for n in (1, 8)]
    assert run_system(fixed, [f"cost.cells={cells}"]).build().cost.covers(0, 4)
    assert compared(recorded(fixed))["generation"][0] > 0


def test_acceptance_that_is_given_anew_replaces_that_of_the_run(runs: dict[str, Path]) -> None:
    seconds = [
        generate(run_system(runs["spec"], change).build()).seconds
        for change in ([], ["drafter.accept=[0.99, 0.98]", "drafter.adaptive=false"])
    ]
    assert seconds[1] < 0.9 * seconds[0]


def test_steps_that_were_not_measured_are_known_as_such(runs: dict[str, Path]) -> None:
    cost = run_system(runs["spec"]).build().cost
    assert cost.covers(K, 8) and cost.covers(0, 1)
    assert not cost.covers(K, 9) and not cost.covers(K + 1, 4)


@pytest.mark.parametrize("name", ["spec", "plain", "two"])
def test_a_run_predicts_itself(runs: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_run(runs[name]) == 0
    assert capsys.readouterr().out.count("bound") == 3
    for predicted, measured in compared(recorded(runs[name])).values():
        assert predicted == pytest.approx(measured, rel=0.03)


def copied(run: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run in which each row of steps.jsonl and metrics.jsonl was changed."""
    shutil.copytree(run, to)
    for name in ("steps", "metrics"):
        rows = read_rows(to / f"{name}.jsonl")
        for row in rows:
            change(row)
        (to / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return to


def held_out(row: dict[str, Any]) -> bool:
    return (row["step"] - 1) % 4 > 1


def slow_generation(row: dict[str, Any]) -> None:
    """Steps 3, 4, 7, 8 and so on were generated on a machine that is slower by half."""
    if held_out(row) and "time/generate_s" in row:
        row["time/step_s"] += 0.5 * row["time/generate_s"]
        row["time/generate_s"] *= 1.5
    if held_out(row) and "engines" in row:
        row["engines"] = {"0": [[*rest, 1.5 * seconds] for *rest, seconds in row["engines"]["0"]]}


def long_ends(row: dict[str, Any]) -> None:
    """Steps in which not all requests verified as much as they drafted took twice as long as the others."""
    if "engines" in row:
        row["engines"] = {e: [*ts, *([k, b, "mixed", n, 0, s] for k, b, kind, n, _, s in ts if kind == "steady")]
                          for e, ts in row["engines"].items()}  # fmt: skip


def slow_without_drafts(row: dict[str, Any]) -> None:
    """Hardly any steps without drafts were measured, while the machine was busy."""
    for steps in row.get("engines", {}).values():
        steps[:] = [step if step[0] else [*step[:3], 1, step[1], 3.0 * step[5] / step[3]] for step in steps]
    for cells in row.get("measured", ()):
        cells[:] = [cell if cell[0] else [*cell[:2], 3.0 * cell[2], *cell[3:]] for cell in cells]


def drafting_alone(row: dict[str, Any]) -> None:
    """As if the engines always drafted."""
    row.pop("measured", None)
    if "engines" in row:
        row["engines"] = {e: [step for step in steps if step[0] == K] for e, steps in row["engines"].items()}


def shorter_at_first(row: dict[str, Any]) -> None:
    """Step 1 drafted one token at most."""
    if row["step"] == 1 and "acceptance" in row:
        row["acceptance"] = [[depth, 1, min(accepted, 1), n] for depth, _, accepted, n in row["acceptance"]]


@pytest.mark.parametrize(
    ("change", "off"), [(slow_generation, "generation of held-out steps"), (long_ends, "generation")]
)
def test_a_run_that_is_not_predicted_fails(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    off: str,
) -> None:
    """Steps 3, 4, 7, 8 and so on are predicted by the others, and all by steps in which every request drafts alike."""
    assert check_run(copied(runs["spec"], tmp_path / "slow", change)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert off in {line[:28].strip() for line in lines if line.endswith("off")}


def test_steps_that_are_left_are_held_out_by_their_place(runs: dict[str, Path]) -> None:
    found = compared(recorded(runs["spec"]).only([1, 3, 5, 7]))
    for predicted, measured in found.values():
        assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["steps", "stream", "metrics"])
def test_the_file_that_a_run_lacks_is_named(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    old = Path(shutil.copytree(runs["spec"], tmp_path / "old"))
    path = old / f"{name}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for text, said in (("".join([lines[0], "{]\n", *lines[1:]]), r"it is damaged \("), ("", "it is empty")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"old/{name}\.jsonl: {said}.*run it again"):
            run_system(old)
    path.unlink()
    with pytest.raises(
        ValueError, match=rf"old/{name}\.jsonl: there is no such file; run it again in a version that has"
    ):
        run_system(old)


def test_one_line_says_what_a_run_lacks(runs: dict[str, Path], tmp_path: Path) -> None:
    old = Path(shutil.copytree(runs["spec"], tmp_path / "old"))
    (old / "metrics.jsonl").write_text('{"step": 99, "time/step_s": 1.0}\n')
    with pytest.raises(ValueError, match=r"old: no step is whole in steps\.jsonl, stream\.jsonl and metrics\.jsonl"):
        run_system(old)
    with pytest.raises(ValueError, match=r"3 whole steps in .* are too few to hold some out"):
        compared(recorded(runs["spec"]).only([1, 2, 3]))
    history = {"speculation": {"proposers": [{"type": "suffix"}]}}
    suffix = write_run(tmp_path / "suffix", steps=1, drafter=None, rollout={"prompts_per_step": 8} | history)
    with pytest.raises(ValueError, match="drafts from history differ in length"):
        recorded(suffix)
    lagging = write_run(tmp_path / "lagging", steps=4, stream={"max_policy_lag": 1})
    assert run_system(lagging).build().lag == 1
    with pytest.raises(ValueError, match=r"--check: with stream\.max_policy_lag above 0"):
        check_run(lagging)


def test_a_step_that_lost_a_group_is_left_out(runs: dict[str, Path], tmp_path: Path) -> None:
    """What its engine did until it died is not in the record."""
    folder = Path(shutil.copytree(runs["spec"], tmp_path / "lost"))
    with (folder / "stream.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "event": "lost", "group": 24, "engine": 0}) + "\n")
    assert sorted(recorded(folder).times["step"]) == [1, 2, 4, 5, 6, 7, 8]
