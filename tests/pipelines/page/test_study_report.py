"""The report of a study: its table, the gap that co-training closed, and arms that did not finish."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.ablate.report import comparison, study_page, write_study_report
from pipelines.ablate.study_record import Spread, gaps_closed, read_study
from pipelines.page.figures import NARROW
from tests.pipelines.page.conftest import arm, images, words, write_study

PLAIN = arm("plain", "none", False, speculation=False, draft_tokens=0, objective="none")
GENERIC_FROZEN = arm("generic-frozen", "generic", False)
GENERIC_ONLINE = arm("generic-online", "generic", True)
IN_DOMAIN = arm("in-domain-frozen", "in-domain", False)
LENGTHS = {
    "generic-frozen": (1.4, 1.6),
    "generic-online": (1.7, 1.8),
    "in-domain-frozen": (2.0, 2.0),
}


def failed(one: dict[str, Any], seed: int, error: str) -> dict[str, Any]:
    runs = [run | {"status": "failed", "error": error} if run["seed"] == seed else run for run in one["runs"]]
    return one | {"runs": runs}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", [PLAIN, GENERIC_FROZEN, GENERIC_ONLINE, IN_DOMAIN], LENGTHS)


def test_the_table_has_the_last_third_over_seeds(whole: Path) -> None:
    table = comparison(read_study(whole))
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert rows[0]["drafter"] == "no speculation"
    assert rows[0]["tokens/s, x no speculation"] == "1.00"
    online = rows[2]
    assert (online["initialisation"], online["drafter"], online["k"]) == ("generic", "co-trained", "2")
    assert online["acceptance length"] == "1.75 (1.70..1.80)"
    assert online["tokens/s, x no speculation"] == "1.75 (1.70..1.80)"
    assert online["seeds"] == "2/2"


def test_the_gain_is_against_the_same_seed_and_policy(tmp_path: Path) -> None:
    """A no-speculation arm of the frozen policy says nothing about the moving one."""
    frozen = PLAIN | {"policy": "frozen"}
    study = read_study(write_study(tmp_path / "s", [frozen, IN_DOMAIN], LENGTHS))
    table = comparison(study)
    assert table.rows[1][table.header.index("tokens/s, x no speculation")] == "-"


def test_the_gap_closed_by_cotraining(whole: Path) -> None:
    (gap,) = gaps_closed(read_study(whole))
    # (1.75 - 1.5) / (2.0 - 1.5), and by seed (0.3 / 0.6) and (0.2 / 0.4).
    assert gap.share is not None
    assert gap.share.mean == pytest.approx(0.5)
    assert (gap.share.low, gap.share.high) == (pytest.approx(0.5), pytest.approx(0.5))
    assert gap.lengths == (pytest.approx(1.5), pytest.approx(1.75), pytest.approx(2.0))


def test_the_gap_uses_only_seeds_with_all_three_arms(tmp_path: Path) -> None:
    arms = [failed(GENERIC_FROZEN, 0, "died"), GENERIC_ONLINE, IN_DOMAIN]
    (gap,) = gaps_closed(read_study(write_study(tmp_path / "s", arms, LENGTHS)))
    assert gap.share is not None
    assert gap.share == Spread(pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5), 1)
    assert gap.lengths == (pytest.approx(1.6), pytest.approx(1.8), pytest.approx(2.0))


def test_the_gap_compares_arms_of_one_policy_and_k(tmp_path: Path) -> None:
    arms = [GENERIC_FROZEN, GENERIC_ONLINE, IN_DOMAIN | {"draft_tokens": 1}]
    (gap,) = gaps_closed(read_study(write_study(tmp_path / "s", arms, LENGTHS)))
    assert gap.share is None
    assert gap.reason == "the study has no frozen in-domain arm to compare with"


def test_an_in_domain_drafter_that_is_no_better_leaves_no_gap(tmp_path: Path) -> None:
    arms = [GENERIC_FROZEN, GENERIC_ONLINE, IN_DOMAIN]
    folder = write_study(tmp_path / "s", arms, LENGTHS | {"in-domain-frozen": (1.5, 1.5)})
    (gap,) = gaps_closed(read_study(folder))
    assert gap.share is None and "there is no gap to close" in gap.reason
    assert "there is no gap to close" in words(study_page(read_study(folder)))


def test_the_report_shows_arms_and_paper_with_the_table_in_files(whole: Path) -> None:
    page = write_study_report(whole)
    text = page.read_text()
    assert page == whole / "report" / "report.html"
    assert "50\u00a0%" in text
    assert "arXiv 2604.26779" in text and "3.32" in text
    alt, svg = images(page)[0]
    assert "generic-frozen from 1.00 to 1.50" in alt
    for name in ("generic-frozen", "generic-online", "in-domain-frozen"):
        assert f">{name}<" in svg
    assert {path.stem for path in page.parent.glob("*.png")} == {
        "acceptance_length_moving_policy_k2", "acceptance_by_position_moving_policy_k2", "net_gain"
    }  # fmt: skip
    markdown = (whole / "report" / "table.md").read_text().splitlines()
    assert len(markdown) == 2 + 4
    assert set(markdown[1]) <= set("|-: ") and "--:" in markdown[1]
    assert "1.75 (1.70..1.80)" in markdown[4]
    with (whole / "report" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["acceptance length mean"] == ""
    assert float(rows[2]["acceptance length low"]) == pytest.approx(1.7)
    assert (rows[2]["arm"], rows[2]["seeds finished"]) == ("generic-online", "2")


def test_arms_differ_without_colour(whole: Path) -> None:
    plots = [plot for section in study_page(read_study(whole)).sections for plot in section.plots]
    draw = next(plot.draw for plot in plots if plot.name.startswith("acceptance_length"))
    assert draw is not None
    axes = draw(NARROW).axes[0]
    lines = [line for line in axes.lines if line.get_label() in LENGTHS]
    assert len({(str(line._dash_pattern), line.get_marker()) for line in lines}) == 3
    assert len({line.get_marker() for line in lines}) == 3
    assert len(axes.collections) == 3  # a seed band each


def test_failed_and_missing_runs_are_named(tmp_path: Path) -> None:
    missing = arm("later", "none", True)
    missing["runs"] = [run | {"status": "missing"} for run in missing["runs"]]
    arms = [PLAIN, failed(GENERIC_ONLINE, 1, "engine died: out of memory"), missing]
    folder = write_study(tmp_path / "s", arms, LENGTHS)
    text = words(study_page(read_study(folder)))
    assert "engine died: out of memory" in text
    assert "not run yet" in text
    assert "3 of 6 runs finished" in text
    assert comparison(read_study(folder)).rows[1][-1] == "1/2"


def test_a_finished_run_that_cannot_be_read_is_a_problem_of_its_arm(whole: Path) -> None:
    (whole / "runs" / "generic-online-s1" / "metrics.jsonl").write_text("")
    text = words(study_page(read_study(whole)))
    assert "finished, but" in text and "no metrics yet" in text


def test_a_study_with_nothing_finished_has_no_empty_figure(tmp_path: Path) -> None:
    arms = [failed(failed(one, 0, "a"), 1, "b") for one in (PLAIN, GENERIC_ONLINE)]
    page = write_study_report(write_study(tmp_path / "s", arms, {}))
    assert images(page) == []
    assert "No arm with a drafter has finished a run." in page.read_text()


def test_runs_link_to_their_own_reports(whole: Path) -> None:
    report = whole / "runs" / "plain-s0" / "report"
    report.mkdir()
    (report / "report.html").write_text("")
    (runs,) = study_page(read_study(whole)).sections[-1].tables
    assert list(runs.links) == ["../runs/plain-s0/report/report.html"] + [None] * 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": [{"name": "x"}]}, r"study.json: not a study \(arms.0.init: Field required;"),
        ({"steps": 0}, r"steps: Input should be greater than 0"),
        ({"arms": [GENERIC_ONLINE | {"policy": "still"}]}, r"arms.0.policy: Input should be 'moving' or 'frozen'"),
    ],
)
def test_a_broken_study_names_the_field(whole: Path, change: dict[str, Any], message: str) -> None:
    path = whole / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        write_study_report(whole)


def test_a_study_that_is_no_json_is_refused(whole: Path) -> None:
    (whole / "study.json").write_text('{"name": ')
    with pytest.raises(ValueError, match=r"study/study.json: not valid JSON"):
        write_study_report(whole)
