"""Rows that wait for the drafter: whose they are, and what leads up to the next one."""

import pytest
import torch

from cotrain.engine.hooks import Rows, between_turns, leading_up_to

WIDTH = 3


def rows(request: str, first: int, number: int = 1, salt: int = 0) -> Rows:
    """Token ids and hidden states tell the position."""
    ids = torch.arange(first, first + number) + salt
    return Rows(request, first, ids, ids.float()[:, None].expand(-1, WIDTH))


def test_rows_of_a_request_come_in_the_order_of_its_text_with_the_token_that_follows():
    waiting = [rows("a", 10, 2), rows("b", 5), rows("a", 12), rows("b", 6), rows("a", 13)]
    b, a = leading_up_to([rows("b", 7), rows("a", 14, 3)], waiting)
    assert (b.request, b.first_position, b.token_ids.tolist()) == ("b", 5, [5, 6, 7])
    assert (a.request, a.first_position, a.token_ids.tolist()) == ("a", 10, [10, 11, 12, 13, 14])
    assert torch.equal(a.hidden, torch.tensor([[10.0], [11.0], [12.0], [13.0]]).expand(-1, WIDTH)) and a.end == 14


def test_finished_requests_are_forgotten():
    (b,) = leading_up_to([rows("b", 7)], [rows("a", 10), rows("b", 5), rows("b", 6)])
    assert b.token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("next_position", [10, 13, 40], ids=["computed again", "a row is missing", "far on"])
def test_rows_that_do_not_lead_up_to_the_next_one_are_forgotten(next_position):
    assert leading_up_to([rows("a", next_position)], [rows("a", 10), rows("a", 11)]) == []


def test_rows_behind_the_next_one_are_forgotten():
    (a,) = leading_up_to([rows("a", 11, salt=100)], [rows("a", 10), rows("a", 11)])
    assert a.token_ids.tolist() == [10, 111] and a.hidden[:, 0].tolist() == [10]


@pytest.mark.parametrize("gap_or_repeat", [11, 13])
def test_rows_that_do_not_continue_what_waits_begin_anew(gap_or_repeat):
    (a,) = leading_up_to([rows("a", gap_or_repeat + 1)], [rows("a", 10, 2), rows("a", gap_or_repeat)])
    assert (a.first_position, a.token_ids.tolist()) == (gap_or_repeat, [gap_or_repeat, gap_or_repeat + 1])


def test_rows_wait_between_the_turns_of_a_trajectory_and_the_newest_are_kept():
    unread = [rows("a", 10, 2), rows("b", 5), rows("a", 12, 3), rows("c", 7), rows("a", 15)]
    assert between_turns(unread, {"a", "c"}, 100) == [unread[0], *unread[2:]]
    assert between_turns(unread, {"a", "c"}, 5) == unread[2:]
    assert between_turns(unread, {"a", "c"}, 4) == unread[3:]
    assert between_turns(unread, set(), 100) == []
    (a,) = leading_up_to(
        [rows("a", 14, 3)], between_turns(unread, {"a"}, 100)
    )  # the cache has the turn but for its last block
    assert (a.first_position, a.token_ids.tolist()) == (10, [*range(10, 15)])
