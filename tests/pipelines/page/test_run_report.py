"""The report of a run: what it says, and that it can always be drawn."""

import json
import re
from pathlib import Path

import pytest

from cotrain.config.files import write_json
from pipelines.page.page import Fact, Plot
from pipelines.page.record import read_run
from pipelines.train.report import run_page, write_run_report
from tests.pipelines.page.conftest import images, row, words, write_run


def facts(folder: Path) -> dict[str, Fact]:
    return {fact.label: fact for fact in run_page(read_run(folder)).facts}


def plots(folder: Path) -> dict[str, Plot]:
    return {plot.name: plot for section in run_page(read_run(folder)).sections for plot in section.plots}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return write_run(tmp_path / "full", [row(step) for step in range(1, 13)])


def test_headline_facts(full: Path) -> None:
    found = facts(full)
    assert found["Reward"].value == "0.25 -> 1.05"
    assert found["Acceptance length"].value == "1.10 -> 2.20"
    assert found["Drafter"].note == "12 put into the running engine, 0 candidates judged by the gate"
    assert (found["Time"].value, found["Time"].note) == ("6m", "12 of 12 steps")
    assert found["Tokens generated"] == Fact("Tokens generated", "12,000", "50 a second of generation")
    assert found["Against no speculation"].value == "0.91 -> 1.02"
    assert found["Expected against served"].value == "+0.0 %"
    assert "12 steps" in found["Expected against served"].note


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, 1.0, 2.0, None, 4.0, 5.0, 7.0, 9.0], "1.50 -> 8.00"),
        ([3.0], "3.00 -> 3.00"),
        ([None, None], "not measured"),
    ],
)
def test_a_change_is_over_measured_steps(tmp_path: Path, values: list[float | None], expected: str) -> None:
    rows = [row(step, policy__reward=value) for step, value in enumerate(values, 1)]
    assert facts(write_run(tmp_path / "run", rows))["Reward"].value == expected


def test_a_speed_that_was_not_measured_is_not_claimed(tmp_path: Path) -> None:
    rows = [row(step, rollout__speedup_vs_no_speculation=None) for step in range(1, 5)]
    folder = write_run(tmp_path / "run", rows)
    assert facts(folder)["Against no speculation"].value == "not measured"
    assert plots(folder)["speedup"].figure is None


def test_expected_that_is_too_hopeful_shows(tmp_path: Path) -> None:
    rows = [row(step, rollout__acceptance_length=2.0, rollout__expected_acceptance_length=2.2) for step in range(1, 5)]
    rows[0]["rollout/expected_acceptance_length"] = None
    found = facts(write_run(tmp_path / "run", rows))["Expected against served"]
    assert found.value == "+10.0 %" and "3 steps" in found.note


def test_the_page_is_whole_and_needs_no_other_file(full: Path) -> None:
    (full / "report").mkdir()
    (full / "report" / "gone.png").write_bytes(b"")  # of an earlier report
    page = write_run_report(full)
    assert page == full / "report" / "report.html"
    text = page.read_text()
    assert not re.search(r'(?:src|href|srcset)="(?!data:)', text)
    assert not re.search(r"@import|<script|<link", text)
    pngs = {path.stem for path in page.parent.glob("*.png")}
    assert pngs == {name for name, plot in plots(full).items() if plot.figure}
    assert len(images(page)) == len(pngs) == 9
    assert all(alt for alt, _ in images(page))
    assert "served: 1.10 first, 2.20 last" in images(page)[0][0]
    for label in ("served", "expected on unseen rollouts", "first step of a new drafter"):
        assert f">{label}<" in images(page)[0][1]


def test_configured_text_cannot_become_markup(tmp_path: Path) -> None:
    task = {"type": "reasoning_gym", "name": "chain_sum", "instruction": "<script>alert(1)</script>"}
    text = write_run_report(write_run(tmp_path / "run", [{"step": 1}], task=task)).read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_one_step_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [row(1)])
    assert facts(folder)["Acceptance length"].value == "1.10 -> 1.10"
    assert len(images(write_run_report(folder))) == 9


def test_a_run_without_a_drafter_says_so(tmp_path: Path) -> None:
    metrics = ("policy/reward", "rollout/tokens_per_s", "time/step_s", "time/generate_s", "versions/policy")
    rows = [{"step": step} | {name: row(step)[name] for name in metrics} for step in (1, 2, 3)]
    folder = write_run(tmp_path / "plain", rows, drafter=None)
    assert "This run has no drafter" in words(run_page(read_run(folder)))
    assert "acceptance_length" not in plots(folder)
    assert plots(folder)["response_length"].figure is None


def test_a_frozen_drafter_has_no_loss_to_draw(tmp_path: Path) -> None:
    rows = [row(step, drafter__loss=None, drafter__published=0.0, versions__drafter=0) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "frozen", rows, drafter={"model": {"type": "eagle3"}, "train": False})
    assert plots(folder)["drafter_loss"].figure is None
    assert facts(folder)["Drafter"].value == "frozen"


@pytest.mark.parametrize("value", [None, "missing"])
def test_nothing_measured_is_words_not_an_empty_figure(tmp_path: Path, value: str | None) -> None:
    rows = [dict.fromkeys(row(step)) | {"step": step} for step in (1, 2)]
    rows = [{"step": one["step"]} for one in rows] if value == "missing" else rows
    folder = write_run(tmp_path / "empty", rows)
    page = write_run_report(folder)
    assert images(page) == []
    assert not list(page.parent.glob("*.png"))
    assert all(plot.text for plot in plots(folder).values())


def test_metrics_that_are_null_in_some_steps(tmp_path: Path) -> None:
    names = [name for name in row(1) if name != "step"]
    rows = [row(step) | {names[(step + i) % len(names)]: None for i in range(5)} for step in range(1, 60)]
    for plot in plots(write_run(tmp_path / "holes", rows)).values():
        assert plot.figure is not None
        assert plot.figure.axes[0].has_data()


def test_the_stages_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    rows = [row(step, time__generate_s=float(step)) for step in (1, 2, 3)]
    plot = plots(write_run(tmp_path / "run", rows))["time_per_stage"]
    assert plot.figure is not None
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in plot.figure.axes[0].lines}
    assert drawn == {"rollouts": [1, 2, 3], "policy and drafter training": [9, 9, 9], "rest": [20, 19, 18]}
    assert "rollouts 7 %, policy and drafter training 30 %, rest 63 %" in plot.text


def test_what_made_the_run_is_shown(full: Path) -> None:
    machine = {"cpu": "A CPU", "cores": 2, "memory_gib": 24.0, "gpus": []}
    attempt = {"date": "2026-11-21T05:20:26+00:00", "argv": ["cotrain", "train"], "git": None, "machine": machine}
    write_json(full / "provenance.json", {"attempts": [attempt]})
    text = words(run_page(read_run(full)))
    assert '"cpu": "A CPU", "cores": 2' in text
    assert "2026-11-21" in text


def test_decisions_are_marked_and_told(tmp_path: Path) -> None:
    served = [0, 0, 1, 1, 1, 2, 3, 3]
    rows = [row(i, versions__drafter=version, drafter__published=0.0) for i, version in enumerate(served, start=1)]
    rows[3]["gate/publish"] = 0.0
    rows[5]["drafter/rolled_back"] = 1.0
    folder = write_run(tmp_path / "run", rows)
    reasons = {"published": "published: gain +0.3", "kept back": "kept back: <b>", "rolled back": "worse than promised"}
    for step, kind in ((2, "published"), (4, "kept back"), (5, "published"), (6, "rolled back")):
        line = {"step": step, "kind": kind, "version": 1, "reason": reasons[kind], "numbers": {}}
        with (folder / "decisions.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    text = words(run_page(read_run(folder)))
    assert all(reason in text for reason in reasons.values())
    figure = plots(folder)["acceptance_length"].figure
    assert figure is not None
    drawn = {str(line.get_label()): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert drawn["first step of a new drafter"] == [3, 6]  # 7 serves an earlier drafter again
    assert drawn["candidate kept back"] == [4]
    assert drawn["taken back after this step"] == [6]
    assert "<b>" not in write_run_report(folder).read_text()
