"""Which requests are tapped: chosen before they run, within the bounds at their greatest length, each now and then."""

from collections import Counter

import pytest

from cotrain.config.schema import FeatureTapConfig, RolloutConfig
from cotrain.records import RolloutRequest
from cotrain.rollout.tap_admission import TapRequest, choose, fewest_tapped, first_of_each_prompt, tap_requests

ROW = 100


def groups(prompts: int, samples: int, length: int = 50, longest: int = 150) -> list[TapRequest]:
    return [TapRequest(prompt, length, longest) for prompt in range(prompts) for _ in range(samples)]


def keys(requests: list[TapRequest], call: int = 0) -> list[str]:
    return [f"{call}/{i}" for i in range(len(requests))]


def test_all_are_tapped_when_all_fit():
    requests = groups(4, 4)
    exactly = FeatureTapConfig(max_bytes=(4 * 50 + 16 * 150) * ROW)
    assert choose(requests, keys(requests), exactly, ROW) == list(range(16))
    less = FeatureTapConfig(max_bytes=exactly.max_bytes - 1)
    assert len(choose(requests, keys(requests), less, ROW)) == 15


def test_the_room_of_the_longest_response_is_reserved():
    requests = groups(8, 8)
    chosen = choose(requests, keys(requests), FeatureTapConfig(max_bytes=3000 * ROW), ROW)
    prompts = {requests[i].prompt for i in chosen}
    assert 3000 - 200 < len(chosen) * 150 + len(prompts) * 50 <= 3000


def test_every_sample_is_tapped_equally_often_over_the_calls():
    requests = groups(16, 1)
    bounds = FeatureTapConfig(max_bytes=4 * 200 * ROW)
    counts = Counter(i for call in range(400) for i in choose(requests, keys(requests, call), bounds, ROW))
    assert sum(counts.values()) == 1600
    assert all(60 < counts[i] < 140 for i in range(16))  # 100 expected, standard deviation 9


def test_a_prompt_that_does_not_fit_is_not_passed_over_for_a_shorter_one():
    requests = [TapRequest(i, 10 if i % 2 else 400, 100) for i in range(40)]
    bounds = FeatureTapConfig(max_bytes=3000 * ROW)
    chosen = [i for call in range(300) for i in choose(requests, keys(requests, call), bounds, ROW)]
    assert sum(i % 2 for i in chosen) / len(chosen) == pytest.approx(0.5, abs=0.03)  # else 0.8


def test_not_even_one_is_an_error_that_names_the_bound():
    requests = groups(1, 2)
    with pytest.raises(
        ValueError, match=r"rollout\.features\.max_bytes: one sequence takes 20000 bytes, above 19999; raise it"
    ):
        choose(requests, keys(requests), FeatureTapConfig(max_bytes=19_999), ROW)


def test_equal_prompt_tokens_are_one_prompt_whatever_their_id():
    rollout = RolloutConfig(max_new_tokens=30)
    requests = [RolloutRequest(*r) for r in (("a", 0, [1, 2], None), ("b", 0, [1, 2], None, 7), ("c", 0, [1], None))]
    assert tap_requests(requests, rollout, {}) == [TapRequest(0, 2, 30), TapRequest(0, 2, 7), TapRequest(1, 1, 30)]
    assert {r.max_new_tokens for r in tap_requests(requests, rollout, {"max_tokens": 5})} == {5}
    known = dict(zip("abc", tap_requests(requests, rollout, {}), strict=True))
    assert first_of_each_prompt(known) == {"a", "c"}


def test_the_share_of_a_run_is_that_of_all_its_engines():
    rollout = RolloutConfig(prompts_per_step=5, samples_per_prompt=4, max_prompt_tokens=50, max_new_tokens=150)
    for num_engines, tapped in ((1, 8), (2, 16), (9, 20)):
        config = rollout.model_copy(
            update={"num_engines": num_engines, "features": FeatureTapConfig(max_bytes=(5 * 50 + 8 * 150) * ROW)}
        )
        assert fewest_tapped(config, ROW) == tapped
