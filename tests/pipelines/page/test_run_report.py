"""The report of a run: what it says, and that it can always be drawn."""

import json
import re
from pathlib import Path

import pytest

from cotrain.config.files import write_json
from pipelines.page.figures import NARROW
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
    assert found["Drafter swaps"].value == "12"
    assert found["Time"].value == "6m"
    assert found["Tokens generated"] == Fact("Tokens generated", "12,000", "50 a second of generation")
    assert found["Against no speculation"].value == "0.91 -> 1.02"
    # Step t + 1 serves exactly what step t expects: 1.1 + 0.1 t.
    assert found["Expected against served"].value == "+0.0\u00a0%"
    assert "11 steps" in found["Expected against served"].note


def test_a_speed_that_was_not_measured_is_not_claimed(tmp_path: Path) -> None:
    rows = [row(step, rollout__speedup_vs_no_speculation=None) for step in range(1, 5)]
    folder = write_run(tmp_path / "run", rows)
    assert facts(folder)["Against no speculation"].value == "not measured"
    assert plots(folder)["speedup"].draw is None


def test_expected_that_is_too_hopeful_shows(tmp_path: Path) -> None:
    rows = [row(step, rollout__acceptance_length=2.0, drafter__expected_acceptance_length=2.2) for step in range(1, 5)]
    assert facts(write_run(tmp_path / "run", rows))["Expected against served"].value == "+10.0\u00a0%"


def test_the_page_is_whole_and_needs_no_other_file(full: Path) -> None:
    page = write_run_report(full)
    assert page == full / "report" / "report.html"
    text = page.read_text()
    assert not re.search(r'(?:src|href|srcset)="(?!data:)', text)
    assert not re.search(r"@import|<script|<link", text)
    pngs = {path.stem for path in page.parent.glob("*.png")}
    assert pngs == {name for name, plot in plots(full).items() if plot.draw}
    assert len(images(page)) == len(pngs) == 9
    assert all(alt for alt, _ in images(page))
    assert "Served acceptance length: 1.10 in step 1, 2.20 in step 12" in images(page)[0][0]
    for label in ("served", "expected on unseen rollouts", "first step of a new drafter"):
        assert f">{label}<" in images(page)[0][1]
    for _, svg in images(page):  # follows the reader into the dark
        assert "@media(prefers-color-scheme:dark)" in svg
        assert "fill: var(--c0)" in svg
        assert "#1c2129" not in svg.partition("</style>")[2]


def test_configured_text_cannot_become_markup(tmp_path: Path) -> None:
    task = {"type": "reasoning_gym", "name": "chain_sum", "instruction": "<script>alert(1)</script>"}
    text = write_run_report(write_run(tmp_path / "run", [{"step": 1}], task=task)).read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_one_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [row(1)])
    assert facts(folder)["Expected against served"].value == "not measured"
    text = words(run_page(read_run(folder)))
    assert "Reward: 0.10 in step 1, its only value." in text
    assert "1 of 1 step, and its mean reward was 0.10. " in text
    assert facts(folder)["Acceptance length"].value == "1.10"
    assert len(images(write_run_report(folder))) == 9


def test_a_run_without_a_drafter_says_so(tmp_path: Path) -> None:
    metrics = ("policy/reward", "rollout/tokens_per_s", "time/step_s", "time/generate_s", "versions/policy")
    rows = [{"step": step} | {name: row(step)[name] for name in metrics} for step in (1, 2, 3)]
    folder = write_run(tmp_path / "plain", rows, drafter=None)
    assert "This run has no drafter" in words(run_page(read_run(folder)))
    assert "acceptance_length" not in plots(folder)
    assert plots(folder)["response_length"].draw is None


def test_the_report_says_how_many_publications_chance_makes(tmp_path):
    rows = [row(step, gate__lower_bound=0.1) for step in range(1, 41)]
    note = facts(write_run(tmp_path / "judged", rows))["Drafter swaps"].note
    assert "40 judged, of which chance alone publishes 2.0 at most on average" in note
    assert "judged" not in facts(write_run(tmp_path / "unjudged", [row(1)]))["Drafter swaps"].note


def test_a_frozen_drafter_has_no_loss_to_draw(tmp_path: Path) -> None:
    changes = {"drafter__loss": None, "drafter__published": 0.0, "versions__drafter": 0}
    rows = [row(step, drafter__expected_acceptance_length=None, **changes) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "frozen", rows, drafter={"model": {"type": "eagle3"}, "train": False})
    loss = plots(folder)["drafter_loss"]
    assert loss.draw is None and "frozen" in loss.text
    assert "stayed frozen" in run_page(read_run(folder)).summary
    assert facts(folder)["Drafter swaps"].value == "0"


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
        assert plot.draw is not None
        assert plot.draw(NARROW).axes[0].has_data()


def test_every_step_of_a_long_run_is_in_the_stage_bars(tmp_path: Path) -> None:
    rows = [row(step, time__generate_s=float(step)) for step in range(1, 202)]
    plot = plots(write_run(tmp_path / "long", rows))["time_per_stage"]
    assert plot.draw is not None
    bars = plot.draw(NARROW).axes[0].containers[0]
    assert len(bars) == 34  # of 6 steps each
    assert bars[0].get_height() == pytest.approx(3.5)
    assert bars[-1].get_height() == pytest.approx(200.0)  # of steps 199 to 201


def test_what_made_the_run_is_shown(full: Path) -> None:
    machine = {"cpu": "A CPU", "cores": 2, "memory_gib": 24.0, "gpus": []}
    attempt = {"date": "2026-11-21T05:20:26+00:00", "argv": ["cotrain", "train"], "git": None, "machine": machine}
    write_json(full / "provenance.json", {"attempts": [attempt]})
    text = words(run_page(read_run(full)))
    assert "A CPU, 2 cores" in text
    assert "2026-11-21" in text


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 1}])
    (folder / "report").mkdir()
    (folder / "report" / "gone.png").write_bytes(b"")
    write_run_report(folder)
    assert not (folder / "report" / "gone.png").exists()


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
    draw = plots(folder)["acceptance_length"].draw
    assert draw is not None
    drawn = {str(line.get_label()): list(line.get_xdata()) for line in draw(NARROW).axes[0].lines}
    assert drawn["first step of a new drafter"] == [3, 6]  # 7 serves an earlier drafter again
    assert drawn["candidate kept back"] == [4]
    assert drawn["taken back after this step"] == [6]
    assert "<b>" not in write_run_report(folder).read_text()
