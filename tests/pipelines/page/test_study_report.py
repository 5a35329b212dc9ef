"""The report of a study: its table, its figures, and arms that did not finish."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipelines.ablate.report import COMPARED, comparison, read_study, study_sections, write_study_report
from pipelines.page.page import Section
from tests.pipelines.page.conftest import arm, images, words, write_study


def drafter(init: str | None, train: bool) -> dict[str, Any]:
    return {"model": {"type": "eagle3"}, "init": init and f"runs/study/inits/{init}/drafter", "train": train}


PLAIN = arm("plain", drafter=None)
GENERIC_FROZEN = arm("generic-frozen", drafter=drafter("generic", False))
GENERIC_ONLINE = arm("generic-online", drafter=drafter("generic", True))
IN_DOMAIN = arm("in-domain-frozen", drafter=drafter("in-domain", False))
LENGTHS = {
    "generic-frozen": (1.4, 1.6),
    "generic-online": (1.7, 1.8),
    "in-domain-frozen": (2.0, 2.0),
}
LENGTH, GAIN, STEP_GAIN, _ = COMPARED


def failed(one: dict[str, Any], seed: int, error: str) -> dict[str, Any]:
    runs = [run | {"status": "failed", "error": error} if run["seed"] == seed else run for run in one["runs"]]
    return one | {"runs": runs}


def rows_of(folder: Path) -> list[dict[str, str]]:
    return comparison(read_study(folder)).to_dict("records")


def page_of(folder: Path) -> list[Section]:
    return list(study_sections(read_study(folder)))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", [PLAIN, GENERIC_FROZEN, GENERIC_ONLINE, IN_DOMAIN], LENGTHS)


def test_the_table_has_the_last_third_over_seeds(whole: Path) -> None:
    rows = rows_of(whole)
    assert (rows[0]["drafter.train"], rows[0]["drafter.init"], rows[0][GAIN]) == ("-", "-", "1.00")
    online = rows[2]
    assert (online["arm"], online["drafter.init"], online["drafter.train"]) == ("generic-online", "generic", "true")
    assert online[LENGTH] == online[GAIN] == "1.75 (1.70..1.80)"
    assert online[STEP_GAIN] == "1.00"  # the steps of all arms take 30 s for 1000 tokens
    assert online["seeds"] == "2/2"
    assert list(online)[:3] == ["arm", "drafter.init", "drafter.train"]  # in nothing else do the arms differ


def test_values_that_are_no_words_are_shown_as_in_a_study_file(tmp_path: Path) -> None:
    stopping = {"stop": ["x"]}
    arms = [arm("random", drafter=drafter(None, True)), arm("given", drafter=drafter("a", True), rollout=stopping)]
    random, given = rows_of(write_study(tmp_path / "s", arms, {}))
    assert (random["drafter.init"], random["rollout.stop"]) == ("none", "[]")
    assert (given["drafter.init"], given["rollout.stop"]) == ("a", '["x"]')


def test_the_gain_is_against_the_same_seed_and_policy(tmp_path: Path) -> None:
    """A no-speculation arm of the frozen policy says nothing about the moving one, nor one seed about another."""
    frozen = arm("plain", drafter=None, policy={"model": "tiny:llama", "train": False})
    folder = write_study(tmp_path / "s", [frozen, IN_DOMAIN], LENGTHS)
    assert rows_of(folder)[1][GAIN] == "-"
    arms = [failed(PLAIN, 0, "died"), GENERIC_ONLINE]
    assert rows_of(write_study(tmp_path / "seeds", arms, LENGTHS))[1][GAIN] == "1.80"


def test_the_report_shows_arms_with_the_table_in_files(whole: Path) -> None:
    page = write_study_report(whole)
    assert page == whole / "report" / "report.md"
    [(file, numbers)] = images(page).items()
    assert file == "acceptance_length_1.png" and "generic-frozen: 1.00 first, 1.50 last" in numbers
    assert [path.name for path in page.parent.glob("*.png")] == [file]
    text = page.read_text()
    html = page.with_suffix(".html").read_text()
    assert html.count("<table>") == text.count("\n|-") + text.count("\n|:") and f'src="{file}"' in html
    assert "1.75 (1.70..1.80)" in next(line for line in text.splitlines() if line.startswith("| generic-online"))
    assert "failed or are missing" not in text
    table = pd.read_csv(whole / "report" / "table.csv").set_index("name")
    assert table["rollout/acceptance_length min"]["generic-online"] == pytest.approx(1.7)
    assert table["seeds"]["generic-online"] == "2/2"
    assert table["rollout/acceptance_rate_pos_1 mean"]["generic-online"] == pytest.approx(
        0.44
    )  # steps 5 and 6: 0.40 and 0.48


def test_arms_differ_without_colour(whole: Path) -> None:
    figure = next(section.figure for section in page_of(whole) if section.image.startswith("acceptance_length"))
    assert figure is not None
    axes = figure.axes[0]
    lines = [line for line in axes.lines if line.get_label() in LENGTHS]
    assert len({str(line._dash_pattern) for line in lines}) == len({line.get_marker() for line in lines}) == 3
    assert len(axes.collections) == 3  # a seed band each


def test_what_drafters_cost_is_in_the_table(whole: Path) -> None:
    path = whole / "runs" / "generic-online-s0" / "metrics.jsonl"
    rows = [json.loads(line) | {"drafter/train_s": 7.25} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    costs = read_study(whole).measured["drafter/train_s"]
    assert costs["generic-online", 0] == 7.25 and costs.count() == 1


def test_failed_and_missing_runs_are_named(tmp_path: Path) -> None:
    missing = arm("later")
    missing["runs"] = [run | {"status": "missing"} for run in missing["runs"]]
    arms = [PLAIN, failed(GENERIC_ONLINE, 1, "engine died: out of memory"), missing]
    folder = write_study(tmp_path / "s", arms, LENGTHS)
    text = words(page_of(folder))
    assert "engine died: out of memory" in text
    assert "missing" in text
    assert "3 of 6" in text
    assert rows_of(folder)[1]["seeds"] == "1/2"


def test_a_finished_run_that_cannot_be_read_is_a_problem_of_its_arm(whole: Path) -> None:
    (whole / "runs" / "generic-online-s1" / "metrics.jsonl").write_text("")
    text = words(page_of(whole))
    assert "finished, but" in text and "no metrics yet" in text


def test_a_study_with_nothing_finished_has_no_empty_figure(tmp_path: Path) -> None:
    arms = [failed(failed(one, 0, "a"), 1, "b") for one in (PLAIN, GENERIC_ONLINE)]
    page = write_study_report(write_study(tmp_path / "s", arms, {}))
    assert images(page) == {}
    assert "4 of 4" in page.read_text()


def test_more_arms_than_a_figure_can_tell_apart_are_in_two(tmp_path: Path) -> None:
    arms = [arm(f"rate-{i}", policy={"model": "tiny:llama", "kl_coefficient": i}) for i in range(9)]
    page = page_of(write_study(tmp_path / "s", arms, {}))
    found = {section.image: section.numbers.count(" first, ") for section in page}
    assert (found["acceptance_length_1.png"], found["acceptance_length_2.png"]) == (7, 2)


def test_a_study_that_is_no_json_is_refused(whole: Path) -> None:
    (whole / "study.json").write_text('{"name": ')
    with pytest.raises(ValueError, match=r"study/study.json is not JSON"):
        write_study_report(whole)
