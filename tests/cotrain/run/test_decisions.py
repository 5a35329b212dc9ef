from dataclasses import asdict

from cotrain.publish.decision import DrafterEvent
from cotrain.run.rows import RowFile, read_rows


def event(step, kind="kept back", reason="kept back, no gain: length 1.2 against 1.3"):
    return DrafterEvent(step, kind, 4, reason, {"gate/gain": -0.1, "gate/seconds_saved": float("nan")})


def test_a_resume_keeps_what_it_does_not_replay(tmp_path):
    path = tmp_path / "decisions.jsonl"
    log = RowFile(path)
    for step in (1, 3, 3, 4):
        log.write(step, asdict(event(step)))
    assert read_rows(path)[0] == {
        "step": 1,
        "kind": "kept back",
        "version": 4,
        "reason": "kept back, no gain: length 1.2 against 1.3",
        "numbers": {"gate/gain": -0.1, "gate/seconds_saved": None},
    }
    log = RowFile(path, resumed_step=3)
    log.write(4, asdict(event(4)))
    assert [row["step"] for row in read_rows(path)] == [1, 3, 3, 4]
    RowFile(path)
    assert read_rows(path) == [] == read_rows(tmp_path / "none")


def test_a_step_line_says_what_the_versions_do_not_show():
    assert event(1).in_short() == "drafter kept back, no gain"
    assert event(1, "published", "published: gain").in_short() == ""
    assert event(1, "rolled back").is_bad_news and not event(1).is_bad_news
