"""Rows that wait for the drafter: whose they are, and what leads up to the next one."""

import pytest
import torch

from cotrain.engine.hooks import Rows, UnreadRows, passes

WIDTH = 3


def rows(request: str, first: int, number: int = 1, salt: int = 0) -> Rows:
    """Token ids and hidden states tell the position."""
    ids = torch.arange(first, first + number) + salt
    return Rows(request, first, ids, ids.float()[:, None].expand(-1, WIDTH))


def waiting(*all_rows: Rows) -> UnreadRows:
    unread = UnreadRows()
    for one in all_rows:
        unread.add(one)
    return unread


def test_rows_of_a_request_come_in_the_order_of_its_text_with_the_token_that_follows():
    unread = waiting(rows("a", 10, 2), rows("b", 5), rows("a", 12), rows("b", 6), rows("a", 13))
    b, a = unread.take([rows("b", 7), rows("a", 14, 3)])
    assert (b.request, b.first_position, b.token_ids.tolist()) == ("b", 5, [5, 6, 7])
    assert (a.request, a.first_position, a.token_ids.tolist()) == ("a", 10, [10, 11, 12, 13, 14])
    assert torch.equal(a.hidden, torch.tensor([[10.0], [11.0], [12.0], [13.0]]).expand(-1, WIDTH)) and a.end == 14


def test_finished_requests_are_forgotten():
    (b,) = waiting(rows("a", 10), rows("b", 5), rows("b", 6)).take([rows("b", 7)])
    assert b.token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("next_position", [10, 13, 40], ids=["computed again", "a row is missing", "far on"])
def test_rows_that_do_not_lead_up_to_the_next_one_are_forgotten(next_position):
    assert waiting(rows("a", 10), rows("a", 11)).take([rows("a", next_position)]) == []


def test_rows_behind_the_next_one_are_forgotten():
    (a,) = waiting(rows("a", 10), rows("a", 11)).take([rows("a", 11, salt=100)])
    assert a.token_ids.tolist() == [10, 111] and a.hidden[:, 0].tolist() == [10]


@pytest.mark.parametrize("gap_or_repeat", [11, 13])
def test_rows_that_do_not_continue_what_waits_begin_anew(gap_or_repeat):
    (a,) = waiting(rows("a", 10, 2), rows("a", gap_or_repeat)).take([rows("a", gap_or_repeat + 1)])
    assert (a.first_position, a.token_ids.tolist()) == (gap_or_repeat, [gap_or_repeat, gap_or_repeat + 1])


def test_taking_empties_it():
    unread = waiting(rows("a", 10))
    assert unread.num_bytes == WIDTH * 4
    unread.take([rows("b", 11)])
    assert unread.num_bytes == 0 and unread.take([rows("a", 11)]) == []


@pytest.mark.parametrize("most", [3, 4, 10, 100])
def test_passes_hold_every_row_once_in_order_and_no_more_than_fit(most):
    lengths = {"a": 5, "b": 1, "c": 7}
    unread = waiting(*(rows(name, 7, length) for name, length in lengths.items()))
    seen: dict[str, list[int]] = {}
    for runs in passes(unread.take([rows(name, 7 + length) for name, length in lengths.items()]), most):
        assert sum(len(run.hidden) for run in runs) <= most
        assert len({run.request for run in runs}) == len(runs), "a run is once in a pass"
        for run in runs:
            positions = list(range(run.first_position, run.end))
            assert run.token_ids.tolist() == [*positions, run.end]
            assert run.hidden[:, 0].tolist() == positions
            seen.setdefault(run.request, []).extend(positions)
    assert seen == {name: list(range(7, 7 + length)) for name, length in lengths.items()}
    assert list(passes([], most)) == []
