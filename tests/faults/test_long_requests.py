"""Fault 13 on a real engine: requests that run into max_model_len while they are drafted for."""

import pytest

from drafters.base import Drafter
from tests.engine.conftest import LiveEngine, make_requests, tokens
from tests.faults.conftest import Fault

pytestmark = pytest.mark.engine

MAX_MODEL_LEN = 300 + 48 + 3 + 1


def test_13_requests_that_reach_the_end(fresh: LiveEngine, fitted_drafter: Drafter, fault: Fault) -> None:
    """In a run max_tokens ends them k + 1 positions before; here nothing does but the engine's own limit."""
    fresh.send_drafter(fitted_drafter.state_for_serving())
    requests = [*make_requests(2, length=300), *make_requests(2, first=2)]
    drafted = fresh.greedy(requests, max_tokens=10_000)
    fresh.run(fresh.engine.set_num_speculative_tokens(0))
    plain = fresh.greedy(requests, max_tokens=10_000)
    assert drafted.speculation
    assert tokens(drafted) == tokens(plain)
    for rollout in drafted.rollouts:
        assert rollout.finish_reason == "length"
        assert len(rollout.prompt_token_ids) + len(rollout.token_ids) == MAX_MODEL_LEN
        assert len(rollout.log_probs) == len(rollout.token_ids)
    lost = sum(len(p) - len(d) for p, d in zip(tokens(plain), tokens(drafted), strict=True))
    fault("13", "requests reach max_model_len while drafting", "none needed: same tokens", steps=0, tokens_lost=lost)
