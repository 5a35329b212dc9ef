"""The greedy check at the end of a run, on engines that answer from a script."""

from typing import Any

import pytest

from cotrain.records import Rollout, RolloutRequest, Versions
from pipelines.train.run import greedy_rollouts


class ScriptedEngines:
    """Remembers what was asked, and which arm filled the prefix cache."""

    def __init__(self) -> None:
        self.num_speculative_tokens: int | None = None
        self.cached_by: int | None = None
        self.asked: list[tuple[int | None, dict[str, Any]]] = []
        self.broken = False

    def generate(self, requests: list[RolloutRequest], **sampling: Any) -> list[Rollout]:
        assert self.cached_by is None, "answered from the other arm's prefix cache"
        if self.broken:
            raise RuntimeError("no engine is left")
        self.cached_by = self.num_speculative_tokens
        self.asked.append((self.num_speculative_tokens, sampling))
        return [Rollout(r.prompt_id, 0, [1], [2], [0.0], "", "length", Versions(0, 0)) for r in requests]

    def call_all(self, method: Any) -> None:
        getattr(self, method.__name__)()

    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def reset_prefix_cache(self) -> None:
        self.cached_by = None


def test_both_arms_are_greedy_at_their_draft_length() -> None:
    engines: Any = ScriptedEngines()
    for k in (0, 3):
        assert len(greedy_rollouts(engines, [RolloutRequest("p", 0, [1], 7)], k, 8)) == 1
    assert [k for k, _ in engines.asked] == [0, 3]
    assert all((s["temperature"], s["seed"], s["max_tokens"]) == (0.0, None, 8) for _, s in engines.asked)


@pytest.mark.parametrize("broken", [False, True])
def test_the_draft_length_is_given_back(broken: bool) -> None:
    engines: Any = ScriptedEngines()
    engines.broken = broken
    if broken:
        with pytest.raises(RuntimeError, match="no engine"):
            greedy_rollouts(engines, [], 3, 8)
    else:
        greedy_rollouts(engines, [], 3, 8)
    assert engines.num_speculative_tokens is None and engines.cached_by is None
