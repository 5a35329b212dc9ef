"""Generation: what holds exactly, beside one engine step after another."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from cotrain.simulation.generation import Acceptance, generate
from cotrain.simulation.step_time import Array, MeasuredCells


class Linear(MeasuredCells):
    """Seconds that are linear in everything."""

    def __init__(
        self, step: float = 1.0, row: float = 0.0, draft: float = 0.0, token: float = 0.0, prompt: float = 0.0
    ):
        self._step, self._row, self._draft, self._token, self._prompt = step, row, draft, token, prompt

    def base(self, k: int, batch: Array) -> Array:
        return self._step + self._row * batch * (k + 1) + self._draft * k

    def slope(self, k: int) -> float:
        return self._token * (1 + k / 8)

    def prefill(self, num_tokens: float) -> float:
        return self._prompt * num_tokens


USUAL = {"step": 1e-2, "row": 1e-4, "draft": 1e-3, "token": 1e-7, "prompt": 1e-5}
FREE = Linear()
"""Every step takes a second, whatever it drafts, verifies and reads."""

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 48), 1, 2000).astype(int).tolist()
NEVER, ALWAYS, HALF = Acceptance([0.0]), Acceptance([1.0]), Acceptance.from_length(2.5, 3)
BY_DEPTH = Acceptance([0.5], [(0, [0.9, 0.8]), (64, [0.5]), (300, [0.0])])


def seconds(
    k: int | Sequence[int] = 0,
    acceptance: Acceptance = NEVER,
    slots: int = 64,
    cost: Any = None,
    lengths: Sequence[int] = LENGTHS,
    prompt: float = 100,
) -> float:
    """Of one engine."""
    by_batch = [k] * (slots + 1) if isinstance(k, int) else k
    return float(generate(cost or Linear(**USUAL), acceptance, by_batch, np.array([lengths]), prompt)[0])


def step_by_step(k: Sequence[int], acceptance: Acceptance, lengths: Sequence[int], prompt: float, seed: int) -> float:
    """A step at a time, each of which draws what it accepts."""
    random, cost, slots, done = Random(seed), Linear(**USUAL), len(k) - 1, [0] * len(lengths)
    starts, emitted, _ = acceptance.progress(max(k))
    curves = np.diff(emitted, axis=0)
    queue, running, clock = list(range(len(lengths))), list[int](), 0.0
    while queue or running:
        new = [queue.pop(0) for _ in range(min(len(queue), slots - len(running)))]
        running += new
        drafts = k[len(running)]
        clock += cost.prefill(prompt * len(new)) + float(cost.base(drafts, np.array(float(len(running)))))
        clock += cost.slope(drafts) * sum(prompt + done[i] for i in running)
        for i in running:
            number, depth = random.random(), np.searchsorted(starts, done[i], side="right") - 1
            done[i] = min(lengths[i], done[i] + 1 + int((number < curves[:drafts, depth]).sum()))
        running = [i for i in running if done[i] < lengths[i]]
    return clock


@pytest.mark.parametrize("seed", range(4))
def test_without_drafts_the_same_as_one_step_after_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, lengths, prompt = int(rng.integers(1, 40)), rng.integers(1, 90, 30).tolist(), int(rng.integers(0, 50))
    expected = step_by_step([0] * (slots + 1), NEVER, lengths, prompt, 0)
    assert seconds(0, NEVER, slots, lengths=lengths, prompt=prompt) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("acceptance", [HALF, BY_DEPTH], ids=["half", "by depth"])
def test_with_drafts_the_mean_of_one_step_after_another(slots: int, by_batch: bool, acceptance: Acceptance) -> None:
    k = [0, *[2] * 6, *[1] * 10, *[0] * 48][: slots + 1] if by_batch else [2] * (slots + 1)
    expected = np.mean([step_by_step(k, acceptance, LENGTHS[:24], 100, seed) for seed in range(12)])
    assert seconds(k, acceptance, slots, lengths=LENGTHS[:24]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("tokens", "error"), [(400, 0.03), (40, 0.08), (12, 0.13), (4, 0.13)])
def test_responses_of_the_same_few_tokens_are_predicted_somewhat_too_fast(tokens: int, error: float) -> None:
    """The stated limit: that by chance some need more steps than others is left out. Last steps beyond an end are not."""
    expected = np.mean([step_by_step([3] * 9, HALF, [tokens] * 24, 0, seed) for seed in range(40)])
    assert 1 - error < seconds(3, HALF, 8, lengths=[tokens] * 24, prompt=0) / expected < 1


def test_a_step_reads_the_context_once_however_many_tokens_it_verifies() -> None:
    """By hand: steps read 10 + 10, then 11 tokens."""
    reads = Linear(step=0.0, token=1.0)
    assert seconds(cost=reads, lengths=[2, 1], prompt=10) == 31
    long = [seconds(k, ALWAYS, cost=reads, lengths=[4000], prompt=0) for k in (0, 1)]
    assert long[1] == pytest.approx(long[0] / 2 * 9 / 8, rel=1e-3)


@pytest.mark.parametrize("slots", [2, 8, 64])
def test_the_gain_is_between_none_and_the_acceptance_length(slots: int) -> None:
    for cost in (FREE, Linear(**USUAL)):
        plain = seconds(0, NEVER, slots, cost)
        assert seconds(0, BY_DEPTH, slots, cost) == pytest.approx(plain), "no draft, no difference"
        for k in (1, 3, 7):
            assert plain / seconds(k, NEVER, slots, cost) <= 1 < plain / seconds(k, HALF, slots, cost)
            assert plain / seconds(k, HALF, slots, cost) <= HALF.length(k) <= k + 1
    one: dict[str, Any] = {"lengths": [4000] * 16, "slots": 1}
    assert seconds(cost=FREE, **one) / seconds(3, HALF, cost=FREE, **one) == pytest.approx(2.5, rel=1e-3)


def test_acceptance_changes_with_depth() -> None:
    """Of 1000 tokens the first 500 take 250 steps and the others 500, whatever the batch."""
    falling = Acceptance([0.5], [(0, [1.0]), (500, [0.0])])
    for lengths in ([1000], [1000] * 5):
        assert seconds(1, falling, 8, FREE, lengths) == 750


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("k", [0, 3])
def test_a_queue_takes_at_least_its_tokens_at_the_peak_rate(slots: int, k: int) -> None:
    batches = np.arange(1.0, slots + 1)
    peak = ((k + 1) * batches / Linear(**USUAL).base(k, batches)).max()
    assert sum(LENGTHS) / peak <= seconds(k, ALWAYS, slots) <= 1.6 * sum(LENGTHS) / peak


def test_engines_do_not_wait_for_each_other() -> None:
    queues = np.array([[2, 2, 0], [1, 3, 9]])
    assert generate(FREE, NEVER, [0, 0, 0], queues, 0).tolist() == [2, 10]
