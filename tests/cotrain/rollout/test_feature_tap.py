"""The tap's store without an engine: what is kept by absolute position, what becomes a hole, what the bounds refuse."""

import pytest
import torch

from cotrain.config import FeatureTapConfig
from cotrain.rollout.feature_tap import FeatureTap

AUX, FINAL = 6, 2
ROW_BYTES = (AUX + FINAL) * 4 + 16  # float32 hidden states, an int64 position and an int64 token id


def tap_with(**bounds) -> FeatureTap:
    return FeatureTap(FeatureTapConfig(**bounds))


def token_at(position: int) -> int:
    return 1000 + position


def hidden_at(positions: torch.Tensor, salt: float = 0.0) -> torch.Tensor:
    return positions[:, None] + torch.linspace(0.1, 0.8, AUX + FINAL) + salt


def record(tap: FeatureTap, start: int, stop: int, request_id: str = "r", salt: float = 0.0, token_shift: int = 0):
    positions = torch.arange(start, stop)
    tap.record(request_id, positions, token_at(positions) + token_shift, hidden_at(positions, salt))


def take(tap: FeatureTap, length: int, request_id: str = "r"):
    return tap.take(request_id, [token_at(p) for p in range(length)], FINAL)


def kept(taken) -> list[int]:
    return taken.mask.nonzero().flatten().tolist()


def test_rows_come_back_split_and_the_last_token_has_none():
    tap = tap_with()
    record(tap, 0, 5)
    record(tap, 5, 6)
    taken = take(tap, 7)
    assert kept(taken) == [0, 1, 2, 3, 4, 5]
    expected = hidden_at(torch.arange(6))
    assert torch.equal(taken.aux_hidden[:6], expected[:, :AUX])
    assert torch.equal(taken.final_hidden[:6], expected[:, AUX:])


def test_the_last_token_is_masked_even_when_it_was_verified():
    tap = tap_with()
    record(tap, 0, 10)  # the tokens after an end-of-sequence token were accepted drafts
    assert kept(take(tap, 8)) == [0, 1, 2, 3, 4, 5, 6]


def test_a_rejected_draft_is_overwritten_by_the_token_in_its_place():
    tap = tap_with()
    record(tap, 0, 4)
    record(tap, 4, 8, token_shift=50, salt=9.0)  # four drafts, of which none was accepted
    record(tap, 4, 6)
    taken = take(tap, 7)
    assert kept(taken) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(taken.aux_hidden[:6], hidden_at(torch.arange(6))[:, :AUX])


def test_a_row_of_another_token_is_a_hole():
    tap = tap_with()
    record(tap, 0, 4)
    record(tap, 4, 6, token_shift=50, salt=9.0)  # rejected, and never computed again
    record(tap, 6, 8)
    taken = take(tap, 9)
    assert kept(taken) == [0, 1, 2, 3, 6, 7]
    assert not taken.aux_hidden[4:6].any()
    assert not taken.final_hidden[4:6].any()


def test_positions_that_were_never_computed_are_holes():
    tap = tap_with()
    record(tap, 130, 140)  # a prefix-cache hit: the first block was not computed
    taken = take(tap, 141)
    assert kept(taken) == list(range(130, 140))
    assert not taken.aux_hidden[:130].any()


def test_a_preempted_request_is_recorded_again():
    tap = tap_with()
    record(tap, 0, 20, salt=9.0)
    record(tap, 0, 12)
    record(tap, 12, 20)
    taken = take(tap, 21)
    assert torch.equal(taken.final_hidden[:20], hidden_at(torch.arange(20))[:, AUX:])


@pytest.mark.parametrize("window", [None, 250, 400])
def test_rows_survive_growth(window):
    tap = tap_with(window=window)
    record(tap, 0, 100)
    for start in range(100, 400, 3):
        record(tap, start, start + 3)
    taken = take(tap, 401)
    kept_from = 400 - (window or 400)
    assert kept(taken) == list(range(kept_from, 400))
    assert torch.equal(taken.aux_hidden[kept_from:400], hidden_at(torch.arange(kept_from, 400))[:, :AUX])


@pytest.mark.parametrize("window", [5, 128, 200])
def test_the_window_keeps_the_latest_positions_of_one_long_prefill(window):
    tap = tap_with(window=window)
    record(tap, 0, 1000)
    taken = take(tap, 1001)
    assert kept(taken) == list(range(1000 - window, 1000))
    assert torch.equal(taken.aux_hidden[1000 - window : 1000], hidden_at(torch.arange(1000 - window, 1000))[:, :AUX])


def test_an_equal_token_in_the_ring_does_not_hide_that_a_row_was_lost():
    tap = tap_with(window=8)
    positions = torch.arange(20)
    tap.record("r", positions, torch.full((20,), 5), hidden_at(positions))
    assert kept(tap.take("r", [5] * 21, FINAL)) == list(range(12, 20))


def test_the_window_bounds_memory():
    tap = tap_with(window=150)
    for start in range(0, 3000, 30):
        record(tap, start, start + 30)
    assert tap.num_bytes == 150 * ROW_BYTES


def test_bytes_are_counted_as_allocated_and_given_back():
    tap = tap_with()
    record(tap, 0, 1, "a")
    record(tap, 0, 129, "b")
    assert tap.num_bytes == (128 + 256) * ROW_BYTES
    take(tap, 2, "a")
    assert tap.num_bytes == 256 * ROW_BYTES
    tap.clear()
    assert tap.num_bytes == 0


def test_a_request_that_outgrows_the_byte_limit_is_given_up_and_makes_room():
    tap = tap_with(max_bytes=3 * 128 * ROW_BYTES)
    record(tap, 0, 100, "a")
    record(tap, 0, 100, "b")
    record(tap, 0, 300, "c")
    record(tap, 100, 300, "a")
    assert tap.num_refused == 2
    record(tap, 300, 310, "a")  # what follows of a refused request is ignored
    assert take(tap, 311, "a") is None
    assert take(tap, 311, "c") is None
    record(tap, 100, 200, "b")  # fits in what "a" gave back
    assert kept(take(tap, 201, "b")) == list(range(200))


def test_the_token_limit_holds_while_all_requests_grow_together():
    tap = tap_with(max_tokens_per_step=100)
    names = ["a", "b", "c", "d"]
    for position in range(40):
        for name in names:
            record(tap, position, position + 1, name)
    whole = [name for name in names if (taken := take(tap, 41, name)) is not None and len(kept(taken)) == 40]
    assert len(whole) == 2
    assert tap.num_refused == 2


def test_a_new_request_over_the_token_limit_is_refused():
    tap = tap_with(max_tokens_per_step=100)
    record(tap, 0, 80, "a")
    record(tap, 0, 30, "b")
    record(tap, 0, 20, "c")
    assert tap.num_refused == 1
    assert take(tap, 31, "b") is None
    assert kept(take(tap, 21, "c")) == list(range(20))


def test_a_request_can_be_taken_once():
    tap = tap_with()
    record(tap, 0, 4)
    assert take(tap, 5) is not None
    assert take(tap, 5) is None
    assert take(tap, 5, "never seen") is None


def test_clear_begins_a_new_step():
    tap = tap_with(max_tokens_per_step=50)
    record(tap, 0, 60)
    assert tap.num_refused == 1
    tap.clear()
    assert tap.num_refused == 0
    record(tap, 0, 50)
    assert len(kept(take(tap, 51))) == 50
