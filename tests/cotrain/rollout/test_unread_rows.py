"""Rows that wait for the drafter: whose they are, and what leads up to the next one."""

import pytest
import torch

from cotrain.rollout.vllm.unread_rows import StepRows, UnreadRows, UnreadRun, pieces

WIDTH = 3


def step(**requests: tuple[int, int, int]) -> tuple[StepRows, torch.Tensor]:
    """name=(first position, rows computed, rows valid). Token ids and hidden states tell request and position."""
    starts, ids = [0], []
    for number, (first, rows, _) in enumerate(requests.values()):
        ids += [1000 * number + p for p in range(first, first + rows)]
        starts.append(len(ids))
    hidden = torch.tensor(ids, dtype=torch.float32)[:, None].expand(-1, WIDTH)
    first_positions = [first for first, _, _ in requests.values()]
    rows_of_step = StepRows(list(requests), starts, first_positions, torch.tensor(ids), hidden)
    return rows_of_step, torch.tensor([n for _, _, n in requests.values()])


def waiting(*steps: tuple[StepRows, torch.Tensor]) -> UnreadRows:
    rows = UnreadRows()
    for one in steps:
        rows.add(*one)
    return rows


def test_rows_of_a_request_come_in_the_order_of_its_text():
    rows = waiting(step(a=(10, 1, 1), b=(5, 1, 1)), step(a=(11, 1, 1), b=(6, 1, 1)), step(a=(12, 1, 1), b=(7, 1, 1)))
    b, a = rows.take(["b", "a"], [8, 13])
    assert (b.request, b.first_position, b.token_ids.tolist()) == (0, 5, [1005, 1006, 1007])
    assert (a.request, a.first_position, a.token_ids.tolist()) == (1, 10, [10, 11, 12])
    assert torch.equal(a.hidden, torch.tensor([[10.0], [11.0], [12.0]]).expand(-1, WIDTH))


def test_rejected_draft_tokens_are_left_out():
    rows = waiting(step(a=(10, 4, 2), b=(5, 4, 4)), step(a=(12, 1, 1), b=(9, 1, 1)))
    a, b = rows.take(["a", "b"], [13, 10])
    assert a.token_ids.tolist() == [10, 11, 12]
    assert b.token_ids.tolist() == [1005, 1006, 1007, 1008, 1009]


def test_a_request_that_joined_later_has_what_it_has():
    rows = waiting(step(a=(10, 1, 1)), step(b=(3, 1, 1), a=(11, 1, 1)))
    a, b = rows.take(["a", "b"], [12, 4])
    assert (a.token_ids.tolist(), b.token_ids.tolist()) == ([10, 1011], [3])


def test_finished_requests_are_forgotten():
    rows = waiting(step(a=(10, 1, 1), b=(5, 1, 1)), step(b=(6, 1, 1)))
    (b,) = rows.take(["b"], [7])
    assert b.token_ids.tolist() == [1005, 6]


@pytest.mark.parametrize("next_position", [10, 13, 40], ids=["computed again", "a row is missing", "far on"])
def test_rows_that_do_not_lead_up_to_the_next_one_are_forgotten(next_position):
    assert waiting(step(a=(10, 1, 1)), step(a=(11, 1, 1))).take(["a"], [next_position]) == []


def test_rows_behind_the_next_one_are_forgotten():
    (a,) = waiting(step(a=(10, 1, 1)), step(a=(11, 1, 1))).take(["a"], [11])
    assert a.token_ids.tolist() == [10]


def test_what_was_computed_again_counts_once():
    rows = waiting(step(a=(10, 1, 1)), step(a=(11, 1, 1)), step(a=(11, 1, 1)))
    (a,) = rows.take(["a"], [12])
    assert (a.first_position, a.token_ids.tolist()) == (10, [10, 11])


def test_taking_empties_it():
    rows = waiting(step(a=(10, 1, 1)))
    assert rows and rows.num_bytes == WIDTH * 4
    rows.take(["b"], [11])
    assert not rows and rows.num_bytes == 0 and rows.take(["a"], [11]) == []


def run(request: int, length: int) -> UnreadRun:
    return UnreadRun(request, 7, torch.arange(length), torch.zeros(length, WIDTH))


@pytest.mark.parametrize("most", [1, 3, 4, 10, 100])
def test_pieces_hold_every_row_once_in_order_and_no_more_than_fit(most):
    groups = list(pieces([run(0, 5), run(1, 1), run(2, 7)], most))
    assert all(sum(s.stop - s.start for _, s in group) <= most for group in groups)
    seen: dict[int, list[int]] = {}
    for group in groups:
        assert len({r.request for r, _ in group}) == len(group), "a run is once in a group"
        for r, s in group:
            seen.setdefault(r.request, []).extend(r.token_ids[s].tolist())
    assert seen == {0: list(range(5)), 1: [0], 2: list(range(7))}
    assert len(groups) == -(-13 // most)
