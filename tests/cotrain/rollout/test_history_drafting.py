"""What drafting from history learns of a step, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.rollout.vllm.history import Asked, HistoryDrafting, Text
from drafters.suffix.index import SuffixIndex

K = 3


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


def test_requests_that_have_ended_are_forgotten(history: HistoryDrafting) -> None:
    history._keys |= {"r": b"", "ended": b""}
    history._asked["ended"] = Asked(0, K, K)
    learn(history, Asked(0, K, K), verified=K, emitted=1)
    assert history._keys.keys() == {"r"} and not history._asked


def test_the_drafter_runs_for_a_few_requests_only_where_they_gain_what_all_pay(history: HistoryDrafting) -> None:
    prices = [1.0, 1.2, 1.3, 1.4], [1.0, 1.4, 1.6, 1.8]
    history._best = [(2, 0.3)]  # two tokens, 0.3 more than a step of 1.6 would yield without speculation
    assert history._passes_pay(prices, 1.0) and history._passes_pay(prices, 0.6)
    assert not history._passes_pay(prices, 0.4)
