"""What drafting from history learns of a step, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.engine.history import Asked, HistoryDrafting, Text, match_class
from cotrain.engine.interface import attached
from cotrain.engine.speculation.draft_length import Plan, Proposed
from cotrain.engine.speculation.served_acceptance import Choice, ServedAcceptance
from drafters.suffix.index import Draft, SuffixIndex

K = 3
RATIOS = {"history": [1.0, 1.2, 1.3, 1.4], "drafter": [1.0, 1.4, 1.6, 1.8]}
DRAFT = Draft(np.zeros(1, np.int32), np.zeros((1, 1)), np.ones((1, 1)), np.ones(1, np.int32), 0)
NOTHING = None, Choice(0, 1.0, 0.0)


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
    assert attached(history._take_draft_token_ids()) == Proposed(False, {"a"})


def test_requests_that_have_ended_are_forgotten(history: HistoryDrafting) -> None:
    history._keys |= {"r": b"", "ended": b""}
    history._asked["ended"] = Asked(0, K, K)
    learn(history, Asked(0, K, K), verified=K, emitted=1)
    assert history._keys.keys() == {"r"} and not history._asked


def test_the_drafter_runs_for_a_few_requests_only_where_they_gain_what_all_pay(history: HistoryDrafting) -> None:
    """With two tokens for all requests a step takes 1.6 times as long, of which 0.3 are passes, whoever drafts."""
    asking = None, Choice(2, 2.0, 0.4)
    for number, pays in ((5, True), (3, True), (2, False)):
        plan = [asking] * number + [NOTHING] * (5 - number)
        assert (history._speed(plan, RATIOS) > 1) == pays
    assert history._speed([asking] * 5, RATIOS) == pytest.approx(2.0 / 1.6)


def test_the_first_draft_of_a_batch_has_to_be_paid_by_all_that_draft(history: HistoryDrafting) -> None:
    """Drafts of one token for 16 requests take 1.4 times as long, and a first one at least 1.2 times."""
    ratios = {"history": [1.0, 1.4, 1.6, 1.8]}
    for drafting, pays in ((1, False), (3, False), (5, True)):
        plan = [(DRAFT, Choice(1, 2.0, 0.6))] * drafting + [NOTHING] * (16 - drafting)
        assert (history._speed(plan, ratios) > 1) == pays
    assert history._speed([NOTHING] * 16, ratios) == 1


def test_proposers_are_probed_in_turn_with_a_token_more_than_is_worth_the_most(history: HistoryDrafting) -> None:
    history._is_alone = False
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    text, other = Text(np.arange(1, 9, dtype=np.int32), 4, 1), Text(np.array([1, 2, 20], np.int32), 2, 1)
    history._of_match = [ServedAcceptance(K, [0.0] * K) for _ in history._of_match]

    def drafted(rates: list[float], probes: bool, ratios: Any = RATIOS) -> tuple[list[bool], list[int]]:
        history._of_drafter = ServedAcceptance(K, rates)
        history._plan = Plan("", ratios, probes)
        taken, lengths = history._propose_from_history(["a", "b"], [text, other], [True] * 2, K)
        return [draft is not None for draft in taken], lengths

    for rates, length in (([0.0] * K, 0), ([0.9, 0.0, 0.0], 1)):
        assert drafted(rates, False) == ([False, False], [length, length])
        assert drafted(rates, True) == ([True, False], [1, length + 1])
        assert drafted(rates, True) == ([False, False], [length + 1, length + 1])
    assert drafted([0.9] * K, False, None) == ([False, False], [K, K]), "all have the same length"
    assert drafted([0.9] * K, True, None) == ([True, False], [K, K])


def test_where_no_match_would_pay_the_index_is_asked_by_probes_alone(history: HistoryDrafting) -> None:
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    text, asked, look_up = Text(np.array([1, 2, 3, 4, 5, 6], np.int32), 4, 1), [], history._draft
    history._draft = lambda *args: asked.append(1) or look_up(*args)

    def lengths(rate: float, probes: bool, ratios: Any = RATIOS) -> tuple[list[int], int]:
        asked.clear()
        history._plan = Plan("", ratios, probes)
        history._of_match = [ServedAcceptance(K, [rate] * K) for _ in history._of_match]
        return history._propose_from_history(["r"], [text], [True], K)[1], len(asked)

    assert lengths(0.0, False) == ([0], 0)
    assert lengths(0.0, True) == ([1], 1)
    assert lengths(1.0, False) == ([K], 1)
    assert lengths(0.0, False, None) == ([K], 1), "all have the same length"


def test_matches_are_counted_by_length_in_powers_of_two() -> None:
    assert [match_class(match) for match in (0, 1, 2, 3, 4, 7, 8, 15, 16, 32)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
