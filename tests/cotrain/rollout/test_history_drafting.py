"""What drafting from history learns of a step, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.rollout.speculation.served_acceptance import ServedAcceptance
from cotrain.rollout.vllm.history import IDLE_STEPS, LOOK_UP_EVERY, Asked, HistoryDrafting, Text, match_class
from drafters.suffix.index import Draft, SuffixIndex

K = 3
PRICES = [1.0, 1.2, 1.3, 1.4], [1.0, 1.4, 1.6, 1.8], 0.0


@pytest.fixture
def history() -> HistoryDrafting:
    hooked = dict.fromkeys(["propose_draft_token_ids", "take_draft_token_ids"])
    runner = SimpleNamespace(num_spec_tokens=K, requests={"r": None}, **hooked)
    return HistoryDrafting(runner, SuffixIndex(2**12), is_alone=True, draws=True)


def learn(history: HistoryDrafting, asked: Asked, verified: int, emitted: int) -> Any:
    history._asked["r"] = asked
    scheduled = {"r": [7] * verified} if verified else {}
    text = Text(np.zeros(4, np.int32), 2, emitted)
    history._learn(SimpleNamespace(scheduled_spec_decode_tokens=scheduled), {"r": text})
    return history._of_match[0].tokens_per_step().tolist()


def test_drafts_that_vllm_dropped_are_not_held_against_the_proposer(history: HistoryDrafting) -> None:
    """It does so with those of requests that are preempted, for an update of the policy among others."""
    before = history._of_match[0].tokens_per_step().tolist()
    assert learn(history, Asked(0, K, K), verified=0, emitted=1) == before
    assert history.take_report()["counts"] == {}
    cut = learn(history, Asked(0, K, K), verified=1, emitted=2)  # one of three was verified, and accepted
    assert cut[1] > before[1] and cut[3] > before[3]


def test_what_the_index_could_not_propose_counts_as_refused(history: HistoryDrafting) -> None:
    _, one, two, _ = learn(history, Asked(0, K, 1), verified=1, emitted=2)
    assert two - one < (one - 1) ** 2, "the second token is accepted less often than the first"


def test_the_scheduler_is_told_whose_drafts_it_takes(history: HistoryDrafting) -> None:
    taken = SimpleNamespace()
    history._take = lambda: taken
    history._asked = {"a": Asked(0, K, K), "b": Asked(None, K, K)}
    assert history._take_draft_token_ids().cotrain_from_history == {"a"}


def test_requests_that_have_ended_are_forgotten(history: HistoryDrafting) -> None:
    history._keys |= {"r": b"", "ended": b""}
    history._asked["ended"] = Asked(0, K, K)
    learn(history, Asked(0, K, K), verified=K, emitted=1)
    assert history._keys.keys() == {"r"} and not history._asked


def test_the_drafter_runs_for_a_few_requests_only_where_they_gain_what_all_pay(history: HistoryDrafting) -> None:
    history._best = [(2, 0.3)]  # two tokens, 0.3 more than a step of 1.6 would yield without speculation
    for asking, pays in ((5, True), (3, True), (2, False)):
        choices = [(None, 2)] * asking + [(None, 0)] * (5 - asking)
        assert (history._gain(choices, PRICES) > 0) == pays


def test_the_first_draft_of_a_batch_has_to_be_paid_by_all_that_draft(history: HistoryDrafting) -> None:
    prices = [1.0, 1.4, 1.6, 1.8], [1.0, 1.4, 1.6, 1.8], 0.2
    for _ in range(100):
        history._of_match[0].observe([(1, 1)])
    length, worth = history._of_match[0].best(prices[0], 1, prices[2])
    history._best = [(length, worth)] * 2
    assert (length, worth) == (1, pytest.approx(2 - 1.2, abs=0.05)), "the first draft is no price of one request"
    draft = Draft(np.zeros(1, np.int32), np.zeros((1, 1)), np.ones((1, 1)), np.ones(1, np.int32), 0)
    for drafting, pays in ((1, False), (3, False), (5, True)):
        choices = [(draft, length)] * drafting + [(None, 0)] * (16 - drafting)
        assert (history._gain(choices, prices) > 0) == pays
    assert history._gain([(None, 0)] * 16, prices) == 0


def test_a_class_of_matches_is_tried_when_it_comes_for_the_first_time(history: HistoryDrafting) -> None:
    history._is_alone = False
    text = Text(np.arange(1, 9, dtype=np.int32), 4, 1)
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    good, bad = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]
    history._of_match = [ServedAcceptance(3, bad) for _ in history._of_match]
    history._of_drafter = ServedAcceptance(3, good)
    assert history._propose_from_history(["a"], [text], [True], 3, None)[0] == [None], "the drafter is better"
    history._of_match = [ServedAcceptance(3) for _ in history._of_match]
    for of_drafter in (good, bad):
        history._of_drafter = ServedAcceptance(3, of_drafter)
        assert history._propose_from_history(["a"], [text], [True], 3, None)[0] != [None], (
            "better or worse than the drafter"
        )


def test_where_no_draft_pays_the_index_is_asked_in_one_step_of_four_until_one_does(history: HistoryDrafting) -> None:
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    text, asked, look_up = Text(np.array([1, 2, 3, 4, 5, 6], np.int32), 4, 1), [], history._draft
    history._draft = lambda *args: asked.append(1) or look_up(*args)

    def lengths(rate: float, number: int) -> list[int]:
        asked.clear()
        history._of_match = [ServedAcceptance(K, [rate] * K) for _ in history._of_match]
        return [history._propose_from_history(["r"], [text], [True], K, PRICES)[1][0] for _ in range(number)]

    history._rng = SimpleNamespace(random=lambda: 1.0)  # no step explores
    assert lengths(0.0, IDLE_STEPS) == [0] * IDLE_STEPS and len(asked) == IDLE_STEPS
    assert lengths(0.0, 20) == [0] * 20 and len(asked) == 20 // LOOK_UP_EVERY
    assert lengths(1.0, 20)[LOOK_UP_EVERY - 1 :] == [K] * (21 - LOOK_UP_EVERY), "drafts pay again"
    history._rng = SimpleNamespace(random=lambda: 0.0)
    assert lengths(0.0, 40) == [1] * 40, "what explores does not rest"


def test_matches_are_counted_by_length_in_powers_of_two() -> None:
    assert [match_class(match) for match in (0, 1, 2, 3, 4, 7, 8, 15, 16, 32)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
