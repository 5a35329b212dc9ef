"""The verdict on greedy output with and without speculation, on scripted engines."""

import math

import pytest

from cotrain.lossless.greedy_check import check_greedy
from cotrain.records import Rollout, RolloutBatch, RolloutRequest, Versions

EQUAL = math.log(0.5)


class ScriptedEngines:
    """Answers with `speculated` while speculation is on and with `plain` while it is off: (token ids, log-probs)."""

    def __init__(self, speculated, plain):
        self.answers = {True: speculated, False: plain}
        self.draft_tokens = 3
        self.cached_by = None
        self.overrides = []

    def generate(self, requests, tap=True, **overrides):
        speculating = self.draft_tokens > 0
        assert self.cached_by in (None, speculating), "answered from the other arm's prefix cache"
        assert not tap
        self.cached_by = speculating
        self.overrides.append(overrides)
        rollouts = [
            Rollout(r.prompt_id, 0, r.prompt_token_ids, token_ids, log_probs, "", "length", Versions(0, 0), None)
            for r, (token_ids, log_probs) in zip(requests, self.answers[speculating], strict=True)
        ]
        return RolloutBatch(rollouts, [], None, 1.0, 1)

    def set_draft_tokens(self, draft_tokens):
        self.draft_tokens = draft_tokens

    def reset_prefix_cache(self):
        self.cached_by = None


def check(speculated, plain, dtype="float32"):
    requests = [RolloutRequest(f"p{i}", 0, [1, 2], i) for i in range(len(plain))]
    engines = ScriptedEngines(speculated, plain)
    return check_greedy(engines, requests, draft_tokens=3, dtype=dtype, max_tokens=8), engines


SURE = ([5, 6, 7], [-0.1, -0.2, -0.3])


def test_equal_output_passes():
    result, _ = check([SURE, SURE], [SURE, SURE])
    assert result.passed
    assert str(result) == "2/2 prompts identical"


def test_both_arms_are_greedy_and_the_draft_length_is_given_back():
    _, engines = check([SURE], [SURE])
    assert engines.draft_tokens is None
    assert engines.cached_by is None
    assert [o["temperature"] for o in engines.overrides] == [0.0, 0.0]
    assert [o["seed"] for o in engines.overrides] == [None, None]


def test_the_draft_length_is_given_back_after_an_error():
    engines = ScriptedEngines([SURE], [])
    with pytest.raises(ValueError, match="zip"):
        check_greedy(engines, [RolloutRequest("p", 0, [1], 0)], 3, "float32", 8)
    assert engines.draft_tokens is None


def test_an_engine_that_chose_not_to_speculate_does_for_the_check():
    engines = ScriptedEngines([SURE], [SURE])
    engines.draft_tokens = 0
    asked = []
    set_draft_tokens = engines.set_draft_tokens
    engines.set_draft_tokens = lambda k: (asked.append(k), set_draft_tokens(k))
    assert check_greedy(engines, [RolloutRequest("p", 0, [1], 0)], 3, "float32", 8).passed
    assert asked == [3, 0, None]


def test_another_token_fails():
    result, _ = check([SURE, ([5, 9, 7], [-0.1, -0.2, -0.3])], [SURE, SURE])
    assert not result.passed
    assert (result.num_identical, result.num_tied) == (1, 0)


@pytest.mark.parametrize(
    ("dtype", "gap", "tied"), [("float32", 1e-5, 1), ("float32", 1e-2, 0), ("bfloat16", 0.25, 1), ("bfloat16", 0.5, 0)]
)
def test_a_tie_is_one_within_the_number_format(dtype, gap, tied):
    speculated = ([5, 6, 7], [-0.1, EQUAL, -0.3])
    plain = ([5, 9, 8], [-0.1, EQUAL - gap, -2.0])
    result, _ = check([speculated, SURE], [plain, SURE], dtype)
    assert result.num_tied == tied
    assert result.passed == bool(tied)
    if tied:
        assert str(result) == "1/2 prompts identical, 1 up to a rounding tie"


def test_two_sure_and_different_tokens_are_no_tie():
    """Equal log-probs alone prove nothing: two tokens above one half cannot be tied."""
    result, _ = check([([5], [-0.1])], [([6], [-0.1])], "float32")
    assert not result.passed


def test_only_the_first_difference_counts():
    """After a tie the texts go apart, and nothing that follows can be compared."""
    speculated, plain = ([5, 6], [EQUAL, -0.01]), ([9, 8], [EQUAL, -3.0])
    assert check([speculated], [plain])[0].num_tied == 1
    speculated, plain = ([5, 6], [-0.01, EQUAL]), ([9, 8], [-3.0, EQUAL])
    assert check([speculated], [plain])[0].num_tied == 0


def test_a_text_that_ends_early_fails():
    result, _ = check([([5, 6], [-0.1, -0.1])], [([5, 6, 7], [-0.1, -0.1, -0.1])])
    assert not result.passed
