"""The tap's store without an engine: what is kept by absolute position, what is shared, what becomes a hole."""

import numpy as np
import pytest
import torch

from cotrain.engine.tap import FeatureTap, as_bytes
from cotrain.engine.tap_admission import TapRequest

WIDTH = 8


def tap_of(*requests: TapRequest) -> FeatureTap:
    """The requests are named a, b and so on."""
    tap = FeatureTap()
    tap.start(dict(zip("abcd", requests, strict=False)))
    return tap


def one(prompt_length: int = 4, longest: int = 5000, prompt: str = "first") -> TapRequest:
    return TapRequest(prompt, prompt_length, longest)


def token_at(position: int) -> int:
    return 1000 + position


def hidden_at(positions: torch.Tensor, salt: float = 0.0) -> torch.Tensor:
    return positions[:, None] + torch.linspace(0.1, 0.8, WIDTH) + salt


def record(tap: FeatureTap, start: int, stop: int, request_id: str = "a", salt: float = 0.0, token_shift: int = 0):
    positions = torch.arange(start, stop)
    token_ids, halves = token_at(positions) + token_shift, hidden_at(positions, salt).split(WIDTH // 2, dim=1)
    rows = [as_bytes(half) for half in halves]
    tap.record(request_id, start, token_ids.numpy(), rows, halves[0].dtype, tap.policy_version)


def take(tap: FeatureTap, length: int, request_id: str = "a", policy_version: int = 0):
    return tap.take(request_id, torch.tensor([token_at(p) for p in range(length)]), policy_version)


def kept(taken) -> list[int]:
    return taken[1].nonzero().flatten().tolist()


def test_rows_come_back_and_the_last_token_has_none():
    tap = tap_of(one())
    record(tap, 0, 5)
    record(tap, 5, 6)
    taken = take(tap, 7)
    assert kept(taken) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(taken[0][:6], hidden_at(torch.arange(6)))
    assert not taken[0][6].any()


def test_the_last_token_is_masked_even_when_it_was_verified():
    tap = tap_of(one())
    record(tap, 0, 10)  # the tokens after an end-of-sequence token were accepted drafts
    assert kept(take(tap, 8)) == [0, 1, 2, 3, 4, 5, 6]


def test_a_rejected_draft_is_overwritten_by_the_token_in_its_place():
    tap = tap_of(one())
    record(tap, 0, 4)
    record(tap, 4, 8, token_shift=50, salt=9.0)  # four drafts, of which none was accepted
    record(tap, 4, 6)
    taken = take(tap, 7)
    assert kept(taken) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(taken[0][:6], hidden_at(torch.arange(6)))


def test_a_row_of_another_token_is_a_hole():
    tap = tap_of(one())
    record(tap, 0, 4)
    record(tap, 4, 6, token_shift=50, salt=9.0)  # rejected, and never computed again
    record(tap, 6, 8)
    taken = take(tap, 9)
    assert kept(taken) == [0, 1, 2, 3, 6, 7]
    assert not taken[0][4:6].any()


def test_positions_that_were_never_computed_are_holes():
    tap = tap_of(one(135))
    record(tap, 130, 140)  # a prefix-cache hit: the first block was not computed
    taken = take(tap, 141)
    assert kept(taken) == list(range(130, 140))
    assert not taken[0][:130].any()


def test_a_preempted_request_is_recorded_again():
    tap = tap_of(one())
    record(tap, 0, 20, salt=9.0)
    record(tap, 0, 12)
    record(tap, 12, 20)
    taken = take(tap, 21)
    assert torch.equal(taken[0][:20], hidden_at(torch.arange(20)))


def test_rows_of_many_steps_stay():
    tap = tap_of(one())
    record(tap, 0, 100)
    for start in range(100, 400, 3):
        record(tap, start, start + 3)
    taken = take(tap, 401)
    assert kept(taken) == list(range(400))
    assert torch.equal(taken[0][:400], hidden_at(torch.arange(400)))


def test_drafts_beyond_the_longest_response_are_dropped():
    tap = tap_of(one(10, longest=20))
    record(tap, 0, 29)
    record(tap, 29, 34)
    record(tap, 34, 36)
    assert kept(take(tap, 30)) == list(range(29))


def test_a_cached_prompt_is_filled_from_a_request_with_the_same_tokens():
    tap = tap_of(one(140), one(140))
    record(tap, 0, 140, "a")
    record(tap, 128, 150, "b")  # the first block was in the cache
    record(tap, 140, 160, "a", token_shift=50)
    taken = take(tap, 151, "b")
    assert kept(taken) == list(range(150))
    assert torch.equal(taken[0][:150], hidden_at(torch.arange(150)))
    assert kept(take(tap, 161, "a")) == list(range(140))  # its response is its own


def test_a_prompt_of_other_tokens_fills_nothing():
    tap = tap_of(one(140), one(140, prompt="second"))
    record(tap, 0, 140, "a")
    record(tap, 128, 150, "b")
    assert kept(take(tap, 151, "b")) == list(range(128, 150))


def test_only_what_was_chosen_is_kept():
    tap = tap_of(one())
    record(tap, 0, 10, "untapped")
    assert take(tap, 11, "untapped") is None


def test_a_request_can_be_taken_once():
    tap = tap_of(one())
    record(tap, 0, 4)
    assert take(tap, 5) is not None
    assert take(tap, 5) is None
    assert take(tap, 5, "never seen") is None


def test_requests_come_and_go_while_others_are_recorded():
    tap = tap_of(one())
    record(tap, 0, 4)
    tap.start({"b": one(prompt="second")})
    record(tap, 0, 9, "b")
    record(tap, 4, 6)
    assert kept(take(tap, 7)) == list(range(6))
    assert kept(take(tap, 10, "b")) == list(range(9))
    assert not tap.requests
    tap.start({"c": one()})
    record(tap, 3, 9, "c")
    assert kept(take(tap, 10, "c")) == list(range(3, 9))  # the first prompt's rows went with its last request


def test_rows_of_another_policy_version_are_holes():
    tap = tap_of(one(), one())
    record(tap, 0, 4, salt=9.0)
    record(tap, 4, 8, salt=9.0)
    tap.policy_version = 1
    record(tap, 2, 6, salt=1.0)  # the first two came from a cache that should have been cleared
    taken = take(tap, 9, policy_version=1)
    assert kept(taken) == [2, 3, 4, 5]
    assert torch.equal(taken[0][2:6], hidden_at(torch.arange(2, 6), 1.0))
    record(tap, 4, 6, "b")
    assert kept(take(tap, 7, "b", policy_version=0)) == [0, 1]


def test_computed_anew_all_rows_are_the_new_versions():
    tap = tap_of(one())
    record(tap, 0, 10, salt=9.0)
    tap.policy_version = 1
    record(tap, 0, 12)
    taken = take(tap, 13, policy_version=1)
    assert kept(taken) == list(range(12)) and torch.equal(taken[0][:12], hidden_at(torch.arange(12)))


ROW = WIDTH * 4


def test_beyond_the_bound_whole_rollouts_are_dropped_the_last_admitted_first():
    tap = FeatureTap()
    tap.start({"a": TapRequest("p", 4, 5000, 1.7), "b": TapRequest("p", 4, 5000, 2.9)}, 40 * ROW)
    tap.start({"c": TapRequest("q", 4, 5000, 2.1)}, 40 * ROW)
    for name in "abc":
        record(tap, 0, 8, name)
    record(tap, 4, 28, "a")  # 8 rows of two prompts, which "a" and "b" share one of, and 24 + 4 + 4 of responses
    assert tap.requests.keys() == {"a", "b", "c"} and tap.dropped == 0
    record(tap, 28, 31, "a")
    assert tap.requests.keys() == {"a", "c"} and tap.dropped == 1
    assert take(tap, 9, "b") is None
    record(tap, 8, 9, "c")
    assert tap.requests.keys() == {"a", "c"}, "40 rows are as many as may be"
    record(tap, 31, 32, "a")
    assert tap.requests.keys() == {"a"}, "the one that was admitted first stays, whoever needs the room"
    record(tap, 32, 400, "a")
    assert kept(take(tap, 401)) == list(range(400)), "one is held however long it is"
    tap.start({"d": one(prompt="another")}, 40 * ROW)
    tap.start({"b": one()}, 40 * ROW)
    record(tap, 0, 36, "d")
    record(tap, 0, 4, "b")
    assert tap.requests.keys() == {"b", "d"}, "what was taken has given its room back"


def test_rows_that_are_computed_again_take_no_room():
    tap = FeatureTap()
    tap.start({"a": one(), "b": one(prompt="second")}, 20 * ROW)
    record(tap, 0, 4, "b")
    for _ in range(5):
        record(tap, 0, 16)
    assert tap.requests.keys() == {"a", "b"}


def test_a_shared_prompt_does_not_change_when_one_of_its_requests_is_taken():
    tap = tap_of(one(), one())
    record(tap, 0, 9)
    record(tap, 4, 9, "b")
    tap.policy_version = 1
    record(tap, 2, 9)
    assert kept(take(tap, 10, policy_version=1)) == list(range(2, 9))
    taken = take(tap, 10, "b")
    assert kept(taken) == [0, 1, *range(4, 9)], "two rows of the prompt are the new policy's"
    assert torch.equal(taken[0][:2], hidden_at(torch.arange(2)))


def test_siblings_whose_turns_were_the_same_share_their_rows():
    """b found rows 4 to 8 in the prefix cache, where a had computed them. They differ at token 9, so nothing behind it is shared."""
    tap = tap_of(one(), one())
    record(tap, 0, 9, "a")
    record(tap, 9, 10, "a", token_shift=1)
    record(tap, 10, 12, "a", salt=100.0)
    record(tap, 9, 10, "b")
    record(tap, 11, 12, "b")
    of_b = np.array([token_at(p) for p in range(13)])
    of_a = of_b + (np.arange(13) == 9)
    tap.share({"a": (of_a, 0), "b": (of_b, 0)})
    hidden, mask = take(tap, 13, "b")
    assert mask.nonzero().flatten().tolist() == [*range(10), 11]
    torch.testing.assert_close(hidden[mask], hidden_at(mask.nonzero().flatten()))


@pytest.mark.parametrize("what", ["another prompt", "another version", "another token"])
def test_rows_that_may_differ_are_not_shared(what):
    tap = tap_of(one(), one(prompt="second" if what == "another prompt" else "first"))
    record(tap, 0, 9, "a", token_shift=what == "another token")
    record(tap, 0, 4, "b")
    record(tap, 9, 12, "b")
    text = np.array([token_at(p) for p in range(13)])
    tap.policy_version = 1 if what == "another version" else 0
    if what == "another version":
        record(tap, 0, 4, "b")
        record(tap, 9, 12, "b")
    tap.share({"a": (text, 0), "b": (text, tap.policy_version)})
    assert kept(take(tap, 13, "b", tap.policy_version)) == [0, 1, 2, 3, 9, 10, 11]
