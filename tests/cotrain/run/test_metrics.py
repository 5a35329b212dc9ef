import json

import pytest

from cotrain.records import SpeculationCounts
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.step_metrics import drafting_metrics
from tests.speculation_counts import counts


def test_rows_are_on_disk_at_once_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = RowFile(path)
    writer.write(1, {"policy/reward": 0.5, "drafter/published": True})
    assert json.loads(path.read_text()) == {"step": 1, "policy/reward": 0.5, "drafter/published": 1}
    writer.write(2, {"policy/reward": 0.75})
    assert read_rows(path)[1] == {"step": 2, "policy/reward": 0.75}


def test_values_that_are_not_finite_become_null_under_their_name(tmp_path):
    writer = RowFile(tmp_path / "m")
    writer.write(1, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    assert read_rows(tmp_path / "m") == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_what_is_no_json_is_refused(tmp_path):
    with pytest.raises(TypeError):
        RowFile(tmp_path / "m").write(1, {"policy/loss": [object()]})


def test_resume_drops_later_rows_and_half_a_line(tmp_path):
    path = tmp_path / "m"
    writer = RowFile(path)
    for step in range(1, 6):
        writer.write(step, {"a": step})
    with path.open("a") as file:
        file.write('{"step": 6, "a"')
    writer = RowFile(path, resumed_step=3)
    writer.write(4, {"a": 40})
    assert [row["a"] for row in read_rows(path)] == [1, 2, 3, 40]


def test_a_new_run_does_not_keep_rows(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n')
    RowFile(tmp_path / "m")
    assert read_rows(tmp_path / "m") == []


def test_drafting_metrics_by_hand():
    # 10 verification steps drafted 30 tokens; 8, 4 and 1 of them got as far as position 1, 2 and 3.
    metrics = drafting_metrics(counts(10, 3, (8, 4, 1)))
    assert metrics == pytest.approx(
        {
            "rollout/drafted_tokens": 30,
            "rollout/num_drafts": 10,
            "rollout/acceptance_length": 2.3,
            "rollout/acceptance_rate_pos_1": 0.8,
            "rollout/acceptance_rate_pos_2": 0.4,
            "rollout/acceptance_rate_pos_3": 0.1,
        }
    )


def test_no_acceptance_is_claimed_where_nothing_was_drafted():
    assert drafting_metrics(SpeculationCounts()) == {
        "rollout/drafted_tokens": 0,
        "rollout/num_drafts": 0,
    }


def test_no_rate_is_claimed_of_a_position_that_no_draft_was_long_enough_for():
    """Drafted and rejected is 0; never drafted is nothing."""
    metrics = drafting_metrics(SpeculationCounts({(1, 0): 3, (1, 1): 3, (2, 1): 4}))
    rates = {name[-1]: rate for name, rate in metrics.items() if "rate_pos" in name}
    assert rates == {"1": 0.7, "2": 0.0}
