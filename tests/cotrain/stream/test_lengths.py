"""Expected lengths of responses, and the makespan of an order."""

import numpy as np
import pytest

from cotrain.stream.lengths import LengthHistory, OrderReport, makespan


def test_a_prompt_is_expected_to_go_on_as_it_was_and_an_unseen_one_as_all_others() -> None:
    lengths = LengthHistory()
    assert lengths.expected("a") == pytest.approx(1.0)
    assert lengths.observe("a", [100, 100], [False, False]) is None
    assert lengths.observe("b", [25], [False]) is None
    assert lengths.expected("a") == pytest.approx(100) and lengths.expected("b") == pytest.approx(25)
    assert lengths.expected("c") == pytest.approx(50)
    assert lengths.observe("a", [50, 50], [False, False]) == pytest.approx(np.log(0.5))
    assert 50 < lengths.expected("a") < 100


def test_what_was_cut_off_counts_as_at_least_what_was_expected() -> None:
    lengths = LengthHistory()
    lengths.observe("a", [400], [False])
    lengths.observe("a", [128], [True])
    assert lengths.expected("a") == pytest.approx(400)
    lengths.observe("a", [128], [False])
    assert lengths.expected("a") < 300


def test_a_saved_history_expects_the_same() -> None:
    lengths, again = LengthHistory(), LengthHistory()
    lengths.observe("a", [7, 9], [False, False])
    again.load(lengths.state())
    assert again.expected("a") == lengths.expected("a") == pytest.approx(63**0.5)


def test_makespan_is_that_of_slots_that_take_the_next_request_when_they_are_free() -> None:
    assert makespan([[1, 1], [1, 1], [4, 4]], 1, 2) == 6
    assert makespan([[4, 4], [1, 1], [1, 1]], 1, 2) == 6
    assert makespan([[1], [1], [1], [4]], 1, 2) == 5
    assert makespan([[4], [1], [1], [1]], 1, 2) == 4
    assert makespan([[4], [4], [1], [1]], 2, 1) == 5


def test_the_report_compares_the_order_of_a_step_with_the_one_drawn() -> None:
    report = OrderReport()
    for number, length in enumerate((1, 1, 1, 4)):
        report.add(number, [length], None if number else -0.25)
    found = report.metrics([3, 0, 1, 2], 1, 2)
    assert found == pytest.approx({"rollout/length_error": 0.25, "rollout/order_speedup": 5 / 4})
    assert report.metrics([], 1, 2) == {}
    report.add(5, [3], 0.5)
    assert report.metrics([5], 1, 2) == {"rollout/length_error": 0.5}, "nothing queues"
