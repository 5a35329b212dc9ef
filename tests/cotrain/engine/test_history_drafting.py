"""What drafting from history learns of a step, and when it drafts, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.suffix_index import distribution
from cotrain.engine.history import HistoryDrafting, Probabilities, Proposal, Step, match_classes, speed_of
from cotrain.engine.speculation.draft_length import Plan
from cotrain.engine.speculation.served_acceptance import Choice, ServedAcceptance
from drafters.suffix.index import Drafts, RequestTexts, SuffixIndex

K = 3
RATIOS = [1.0, 1.2, 1.3, 1.4]
NOTHING = Choice(0, 1.0)
CHOOSE = Plan(RATIOS)


@pytest.fixture
def history() -> HistoryDrafting:
    runner = SimpleNamespace(num_spec_tokens=K, requests={"r": None}, propose_draft_token_ids=None)
    return HistoryDrafting(runner, SuffixIndex(2**12), draws=True)


def learn(history: HistoryDrafting, proposal: Proposal | None, verified: int, emitted: int) -> Any:
    if proposal is not None:
        history._proposals["r"] = proposal
    step = Step(["r"], np.zeros(1, np.int64), np.array([emitted]))
    history._learn({"r": [7] * verified} if verified else {}, step)
    return history._of_match[0].tokens_per_step().tolist()


def test_drafts_that_vllm_dropped_are_not_held_against_the_index(history: HistoryDrafting) -> None:
    """It does so with those of requests that are preempted, for an update of the policy among others."""
    before = history._of_match[0].tokens_per_step().tolist()
    assert learn(history, Proposal(0, K, K), verified=0, emitted=1) == before
    cut = learn(history, Proposal(0, K, K), verified=1, emitted=2)  # one of three was verified, and accepted
    assert cut[1] > before[1] and cut[3] > before[3]


def test_what_the_index_could_not_propose_counts_as_refused(history: HistoryDrafting) -> None:
    _, one, two, _ = learn(history, Proposal(0, K, 1), verified=1, emitted=2)
    assert two - one < (one - 1) ** 2, "the second token is accepted less often than the first"


def test_requests_that_have_ended_are_forgotten(history: HistoryDrafting) -> None:
    history._proposals["ended"] = Proposal(0, K, K)
    learn(history, Proposal(0, K, K), verified=K, emitted=1)
    assert not history._proposals


def test_the_first_draft_of_a_batch_has_to_be_paid_by_all_that_draft() -> None:
    """Drafts of one token for 16 requests take 1.4 times as long, and a first one at least 1.2 times."""
    ratios = [1.0, 1.4, 1.6, 1.8]
    for drafting, pays in ((1, False), (3, False), (5, True)):
        assert (speed_of([Choice(1, 2.0)] * drafting + [NOTHING] * (16 - drafting), ratios) > 1) == pays
    assert speed_of([NOTHING] * 16, ratios) == 1
    assert speed_of([Choice(1, 2.0), NOTHING], None) == 1.5, "where a length is fixed, tokens count alone"


TEXTS = np.array([np.arange(1, 9), [1, 2, 20, *[0] * 5]], np.int32)
"""A text that the index knows, and one that it does not, which has three tokens."""


def drafted(history: HistoryDrafting, rate: float, plan: Plan) -> list[int] | None:
    """Numbers of tokens that history drafts for TEXTS if all its drafts have been accepted at this rate."""
    history._of_match = [ServedAcceptance(K, [rate] * K) for _ in history._of_match]
    history._texts = RequestTexts(2, 20)
    rows = history._texts.follow(["a", "b"], TEXTS, np.array([8, 3]), np.array([4, 2]))
    drafts = history._drafts(plan, Step(["a", "b"], rows, np.ones(2, np.int64)), np.ones(2, bool), K)
    return None if drafts is None else drafts.nums.tolist()


def test_requests_draft_where_the_whole_step_gains(history: HistoryDrafting) -> None:
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    assert drafted(history, 1.0, CHOOSE) == [K, 0], "one of two, for a step that takes 1.25 times as long"
    assert drafted(history, 1.0, Plan([1.0, 1.8, 3.0, 5.0])) is None, (
        "1.5 tokens in a step that takes 1.6 times as long"
    )
    assert drafted(history, 0.0, CHOOSE) is None, "nothing pays"
    assert drafted(history, 0.01, Plan()) == [K, 0], "all that draft have the same length"


def test_a_probe_drafts_a_token_more_than_is_worth_the_most(history: HistoryDrafting) -> None:
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    assert drafted(history, 0.0, CHOOSE._replace(probes=True)) == [1, 0]
    assert drafted(history, 1.0, CHOOSE._replace(probes=True)) == [K, 0]


def test_where_no_match_would_pay_the_index_is_asked_by_probes_alone(history: HistoryDrafting) -> None:
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    asked, look_up = [], history.index.draft
    history.index.draft = lambda *args: asked.append(1) or look_up(*args)
    assert drafted(history, 0.0, CHOOSE) is None and not asked
    assert drafted(history, 0.0, CHOOSE._replace(probes=True)) == [1, 0] and len(asked) == 1


@pytest.mark.parametrize(("rate", "drafts"), [(1.0, [[9, 10, 11]]), (0.0, [[]])])
def test_vllm_gets_lists_of_drafts_and_the_distributions_that_they_were_drawn_from(
    rate: float, drafts: list[list[int]]
) -> None:
    batch = SimpleNamespace(
        req_ids=["r"],
        num_tokens_no_spec=np.array([8]),
        num_prompt_tokens=np.array([4]),
        token_ids_cpu=TEXTS,
        vocab_size=20,
    )
    runner: Any = SimpleNamespace(
        num_spec_tokens=K, requests={"r": None}, input_batch=batch, device="cpu", propose_draft_token_ids=None
    )
    runner.discard_request_mask = SimpleNamespace(np=[False])
    history = HistoryDrafting(runner, SuffixIndex(2**12), draws=False)
    history.add([([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])])
    history._of_match = [ServedAcceptance(K, [rate] * K) for _ in history._of_match]
    output = SimpleNamespace(num_spec_tokens_to_schedule=K, scheduled_spec_decode_tokens={}, cotrain=CHOOSE)
    sampling = SimpleNamespace(all_greedy=False, all_random=True)
    assert runner.propose_draft_token_ids(output, [[8]], sampling) == drafts
    if rate:
        assert runner._draft_probs.argmax(-1).tolist() == drafts and runner._draft_probs.sum() == 3
    else:
        assert runner._draft_probs is None


def test_matches_are_counted_by_length_in_powers_of_two() -> None:
    assert match_classes(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 32])).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_the_tensor_of_distributions_holds_those_of_the_step_alone() -> None:
    runner = SimpleNamespace(device="cpu", input_batch=SimpleNamespace(vocab_size=11))
    probabilities, rng = Probabilities(runner), np.random.default_rng(0)
    for requests, k, likeliest in ((4, 3, False), (2, 2, False), (3, 1, True), (4, 3, True), (5, 3, False)):
        supports = np.array([rng.permutation(11)[:4] for _ in range(requests * k)], np.int32).reshape(requests, k, 4)
        laws = rng.dirichlet(np.ones(4), (requests, k))
        nums = rng.integers(0, k, requests, endpoint=True)
        nums[0] = k
        drafts = Drafts(supports[:, :, 1], supports, laws, np.full((requests, k), 4, np.int32), nums, nums)
        expected = torch.zeros(requests, k, 11)
        for i, num in enumerate(nums):
            for j in range(num):
                of_token = {int(supports[i, j, 1]): 1.0} if likeliest else distribution(drafts, i, j)
                for token, value in of_token.items():
                    expected[i, j, token] = value
        assert torch.equal(probabilities.of(drafts, np.full(requests, likeliest)), expected)


def test_a_thread_learns_one_piece_for_each_step(history: HistoryDrafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """So all ranks of an engine, which make the same steps, have the same index in each."""
    monkeypatch.setattr("drafters.suffix.index.PIECE", 1)
    history.add([([1], [2, 3, 4]), ([1], [5, 6, 7])])
    pieces = 1
    while history.index.is_behind:
        size = history.index.num_bytes
        assert history.index.num_bytes == size, "nothing goes on between steps"
        history._go_on_learning()
        pieces += 1
    assert pieces > 4 and history.index.num_tokens == 6
