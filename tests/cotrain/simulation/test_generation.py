"""Generation of a step: what holds exactly, beside one step after another, and what was measured of a batch that drains."""

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from cotrain.rollout.speculation.step_costs import StepCosts
from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.scenario import DraftLengths, Engines, Generation, Scenario, generate
from cotrain.simulation.step_time import Array, MeasuredCells, Origin
from tests.cotrain.simulation.cpu_cells import (
    ACCEPTANCE_LENGTH,
    DRAINING,
    DRAINING_LENGTHS,
    best_lengths,
    cells_of,
    step_seconds,
)


class Linear:
    """Seconds that are linear in everything."""

    origin: Origin = "measured"

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

    def covers(self, k: int, batch: int) -> bool:
        return True


USUAL = {"step": 1e-2, "row": 1e-4, "draft": 1e-3, "token": 1e-7, "prompt": 1e-5}
FREE = Linear()
"""Every step takes a second, whatever it drafts, verifies and reads."""

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 48), 1, 2000).astype(int).tolist()
NEVER, ALWAYS = Acceptance([0.0]), Acceptance([1.0])
HALF = Acceptance.from_length(2.5, 3)
BY_DEPTH = Acceptance([0.5], [(0, [0.9, 0.8]), (64, [0.5]), (300, [0.0])])
PLACES = [Engines(1, 64), Engines(3, 16), Engines(1, 8), Engines(4, 2), Engines(2, 16, kv_tokens=6000)]
"""Without a queue, on one and on three engines; with one; with one since the context is full."""


def place_id(engines: Engines) -> str:
    return f"{engines.count}x{engines.max_num_seqs}" + (" little memory" if engines.kv_tokens else "")


everywhere = pytest.mark.parametrize("engines", PLACES, ids=place_id)


def scenario(k: DraftLengths = 0, acceptance: Acceptance | None = None, engines: Engines = PLACES[0],
             cost: Any = None, lengths: list[int] = LENGTHS, prompt: int = 100) -> Scenario:  # fmt: skip
    return Scenario(cost or Linear(**USUAL), engines, [[n] for n in lengths], prompt, acceptance, k)


def run(*arguments: Any, **fields: Any) -> Generation:
    return generate(scenario(*arguments, **fields))


def told(generation: Generation) -> list[Any]:
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in generation[:-1]]


def step_by_step(s: Scenario, seed: int = 0) -> tuple[float, int]:
    """Seconds and drafted tokens of a step on one engine, a step at a time."""
    random, prompt, lengths = Random(seed), s.prompt_tokens, s.flat.tolist()
    by_depth = s.acceptance._by_depth if s.acceptance else []
    curves = [(depth, Acceptance(curve.tolist()).survival(s.most_drafted).tolist()) for depth, curve in by_depth]
    base = cache(lambda k, batch: float(s.cost.base(k, np.array(float(batch)))))
    queue, running, done, clock, drafted = list(range(len(lengths))), list[int](), [0] * len(lengths), 0.0, 0
    while queue or running:
        new = list[int]()
        while queue and len(running) < s.engines.max_num_seqs:
            if sum(lengths[i] + prompt for i in [*running, queue[0]]) > (s.engines.kv_tokens or np.inf):
                break
            new.append(queue.pop(0))
            running.append(new[-1])
        draft = s.k_at(len(running))
        clock += s.cost.prefill(prompt * len(new)) + base(draft, len(running))
        clock += s.cost.slope(draft) * sum(prompt + done[i] for i in running)
        drafted += draft * len(running)
        for i in running:
            number, curve = random.random(), [c for depth, c in curves if depth <= done[i]][-1] if draft else []
            done[i] = min(lengths[i], done[i] + 1 + sum(number < rate for rate in curve[:draft]))
        running = [i for i in running if done[i] < lengths[i]]
    return clock, drafted


@pytest.mark.parametrize("seed", range(8))
def test_without_drafts_the_same_as_one_step_after_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    place = Engines(1, int(rng.integers(1, 40)), int(rng.integers(140, 1500)))
    s = scenario(engines=place, lengths=rng.integers(1, 90, 30).tolist(), prompt=int(rng.integers(0, 50)))
    assert generate(s).seconds == pytest.approx(step_by_step(s)[0], rel=1e-12)


@pytest.mark.parametrize("place", [Engines(1, 64), Engines(1, 8), Engines(1, 64, kv_tokens=6000)], ids=place_id)
@pytest.mark.parametrize("k", [2, [0, *[2] * 6, *[1] * 10, *[0] * 48]], ids=["fixed", "by batch size"])
@pytest.mark.parametrize("acceptance", [HALF, BY_DEPTH], ids=["half", "by depth"])
def test_with_drafts_the_mean_of_one_step_after_another(
    place: Engines, k: DraftLengths, acceptance: Acceptance
) -> None:
    s = scenario(k, acceptance, place, lengths=LENGTHS[:24])
    seconds, drafted = np.mean([step_by_step(s, seed) for seed in range(12)], axis=0)
    found = generate(s)
    assert found.seconds == pytest.approx(seconds, rel=0.015) and found.drafted == pytest.approx(drafted, rel=0.03)


@pytest.mark.parametrize(("short", "error"), [(40, 0.02), (12, 0.02), (4, 0.04)])
def test_responses_of_a_few_tokens_take_the_steps_that_they_do(short: int, error: float) -> None:
    """Last steps are not used to the full, and of requests of the same length some need more steps than others."""
    s = scenario(3, HALF, Engines(1, 8), lengths=[short] * 24, prompt=0)
    seconds = np.mean([step_by_step(s, seed)[0] for seed in range(40)])
    assert generate(s).seconds == pytest.approx(seconds, rel=error)


def test_a_step_reads_the_context_once_however_many_tokens_it_verifies() -> None:
    """By hand: steps read 10 + 10, then 11 tokens."""
    reads = Linear(step=0.0, token=1.0)
    assert run(cost=reads, lengths=[2, 1], prompt=10).seconds == 31
    long = [run(k, ALWAYS, cost=reads, lengths=[4000], prompt=0).seconds for k in (0, 1)]
    assert long[1] == pytest.approx(long[0] / 2 * 9 / 8, rel=1e-3)


@everywhere
def test_no_speculation_is_the_same_to_the_bit_in_every_form(engines: Engines) -> None:
    plain = told(run(0, None, engines))
    assert told(run(0, BY_DEPTH, engines)) != [] and run(0, BY_DEPTH, engines).seconds == pytest.approx(plain[0])
    assert told(run([0] * (engines.max_num_seqs + 1), HALF, engines)) == plain
    adaptive = best_lengths(Linear(**USUAL), NEVER, 5, engines.max_num_seqs, mean_context=500)
    assert told(run(adaptive, NEVER, engines)) == plain


@everywhere
@pytest.mark.parametrize("k", [1, 3, 7])
def test_drafts_that_are_never_accepted_are_never_faster(engines: Engines, k: int) -> None:
    plain, drafted = run(0, None, engines), run(k, NEVER, engines)
    assert drafted.seconds > plain.seconds
    assert run(k, NEVER, engines, FREE).seconds == run(0, None, engines, FREE).seconds
    assert drafted.acceptance_length == 1 and drafted.drafted == pytest.approx(k * sum(LENGTHS))


@everywhere
@pytest.mark.parametrize("acceptance", [ALWAYS, HALF, BY_DEPTH], ids=["always", "half", "by depth"])
def test_every_token_is_generated_once_and_every_request_ends(engines: Engines, acceptance: Acceptance) -> None:
    by_batch = [(5 - batch) % 5 for batch in range(engines.max_num_seqs + 1)]
    for k in (0, 3, by_batch):
        found = run(k, acceptance, engines)
        ends, running = found.timeline
        assert running[0].sum() > 0 and (np.diff(ends, axis=0) >= 0).all()
        assert running.min() >= 0 and running.max() <= engines.max_num_seqs
        if k == 3:
            emitted = found.drafted / 3 + found.accepted
            assert sum(LENGTHS) < emitted < sum(LENGTHS) + 1.6 * len(LENGTHS)


def test_speed_up_is_at_most_the_acceptance_length_and_never_above_k_plus_one() -> None:
    for cost in (FREE, Linear(**USUAL)):
        plain = run(cost=cost).seconds
        for k, acceptance in ((1, HALF), (3, HALF), (7, HALF), (3, ALWAYS), (7, ALWAYS)):
            assert 1 < plain / run(k, acceptance, cost=cost).seconds <= acceptance.length(k) <= k + 1


def test_on_an_infinitely_fast_machine_the_speed_up_is_the_acceptance_length() -> None:
    """And where drafts cost the host time, it is less by what they cost. One request after another."""
    one: dict[str, Any] = {"lengths": [4000] * 16, "engines": Engines(1, 1)}
    plain = run(cost=FREE, **one).seconds
    assert plain / run(3, ALWAYS, cost=FREE, **one).seconds == pytest.approx(4, rel=1e-3)
    drafted = run(3, HALF, cost=FREE, **one)
    assert plain / drafted.seconds == pytest.approx(2.5, rel=1e-3)
    assert plain / drafted.seconds == pytest.approx(drafted.acceptance_length, rel=1e-3)
    assert run(3, HALF, cost=Linear(draft=0.1), **one).seconds == pytest.approx(1.3 * drafted.seconds)


@everywhere
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_as_much_is_accepted_as_the_input_says(engines: Engines, k: int) -> None:
    assert run(k, HALF, engines).acceptance_length == pytest.approx(HALF.length(k))


def test_acceptance_changes_with_depth() -> None:
    """Of 1000 tokens the first 500 take 250 steps and the others 500, whatever the batch."""
    falling = Acceptance([0.5], [(0, [1.0]), (500, [0.0])])
    for lengths in ([1000], [1000] * 5):
        assert run(1, falling, Engines(1, 8), FREE, lengths).seconds == 750


def test_order_of_requests_that_run_at_once_changes_nothing_but_chance() -> None:
    order = np.random.default_rng(3).permutation(len(LENGTHS))
    for k, acceptance in ((0, None), (3, HALF), ([0, *[1, 2, 3] * 22], BY_DEPTH)):
        mixed = run(k, acceptance, lengths=[LENGTHS[i] for i in order])
        assert mixed.seconds == pytest.approx(run(k, acceptance).seconds, rel=0.01 if k else 1e-12)


@everywhere
def test_scaling_all_times_scales_the_answer(engines: Engines) -> None:
    once, twice = (run(3, HALF, engines, Linear(**{n: f * s for n, s in USUAL.items()})) for f in (1, 2))
    assert twice.seconds == 2 * once.seconds and twice.drafted == once.drafted
    assert (twice.timeline[0] == 2 * once.timeline[0]).all()
    assert twice.busy == once.busy and 0 < once.busy <= 1


def test_a_pace_is_that_of_steps_with_drafts_alone() -> None:
    alone = {"cost": Linear(step=1e-2, row=1e-4), "lengths": [100] * 8}
    s = scenario(2, NEVER, **alone)
    assert generate(replace(s, draft_pace=1.5)).seconds == pytest.approx(1.5 * generate(s).seconds)
    assert generate(replace(s, k=0, draft_pace=1.5)).seconds == generate(replace(s, k=0)).seconds
    two = replace(s, lengths=s.lengths * 2, steps=2)
    assert generate(replace(two, draft_pace=np.array([1.0, 1.5]))).step_seconds == pytest.approx(
        generate(s).seconds * np.array([1.0, 1.5])
    )


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("k", [0, 3])
def test_a_queue_takes_at_least_its_tokens_at_the_peak_rate(slots: int, k: int) -> None:
    found = run(k, ALWAYS, Engines(1, slots))
    batches = np.arange(1.0, slots + 1)
    peak = ((k + 1) * batches / Linear(**USUAL).base(k, batches)).max()
    assert sum(LENGTHS) / peak <= found.seconds <= 1.6 * sum(LENGTHS) / peak


def test_more_engines_or_slots_are_not_slower_where_the_batch_costs_nothing() -> None:
    places = (Engines(1, 1), Engines(1, 8), Engines(2, 8), Engines(8, 8))
    seconds = [run(0, None, place, FREE).seconds for place in places]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == sum(LENGTHS) and seconds[-1] == max(LENGTHS)


def test_requests_wait_for_room() -> None:
    held: dict[str, Any] = {"cost": FREE, "lengths": [1000] * 8}
    assert run(engines=Engines(1, 8, kv_tokens=2200), **held).seconds == 4000
    assert run(engines=Engines(1, 8, kv_tokens=8800), **held).seconds == 1000


def test_groups_are_dealt_out_in_turn() -> None:
    def seconds(*groups: list[int]) -> list[float]:
        s = Scenario(FREE, Engines(2, 2), [*groups], 0, None, 0)
        return generate(s).timeline[0][-1].tolist()

    assert seconds([2, 2], [1, 3], [9, 9], [1, 2]) == [11, 4]
    assert seconds([2], [2], [1], [3], [9], [9], [1], [2]) == [10, 11]
    assert seconds([2, 2, 2], [5]) == [4, 5]


@pytest.mark.parametrize(
    ("survival", "k", "times", "length"),
    [([0.8, 0.6, 0.4], 3, 2.9 / 2.8, 2.9), ([0.8, 0.4], 1, 0.5, 1.0), ([0.9, 0.8], 2, 5.0, 3.0), ([0.0], 2, 1.1, 1.1)],
)
def test_a_longer_acceptance_is_as_much_faster_within_bounds(
    survival: list[float], k: int, times: float, length: float
) -> None:
    """On a machine on which every step takes a second, of one long response."""
    s = scenario(k, Acceptance(survival), cost=FREE, lengths=[20_000])
    assert generate(s).seconds / generate(s.longer(times)).seconds == pytest.approx(length / s.length(k))
    plain = scenario(0, Acceptance(survival), cost=FREE, lengths=[200])
    assert generate(plain.longer(times)).seconds == generate(plain).seconds


@pytest.mark.parametrize("drafter", DRAINING)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_fixed_batches_predict_the_speed_up_of_a_batch_that_drains(drafter: str, k: int) -> None:
    acceptance = Acceptance.from_length(ACCEPTANCE_LENGTH[drafter][k], k)
    s = scenario(k, acceptance, Engines(1, 16), cells_of(drafter, k), DRAINING_LENGTHS, 0)
    measured, error = DRAINING[drafter][k]
    predicted = generate(s.without_speculation()).seconds / generate(s).seconds
    assert predicted == pytest.approx(measured, abs=max(0.05 * measured, 2 * error))


@pytest.mark.parametrize(("k_max", "best"), [(0, {0}), (1, {0, 1}), (3, {0, 1, 2, 3})])
def test_best_lengths_are_those_that_the_controller_of_the_engines_would_choose(k_max: int, best: set[int]) -> None:
    cells = {(k, batch): step_seconds("good", k, batch) for k in range(4) for batch in (1, 4, 16)}
    acceptance = Acceptance([0.32, 0.22, 0.15])
    found = best_lengths(MeasuredCells(cells), acceptance, k_max, 16, mean_context=0)
    tokens = np.array([acceptance.length(k) for k in range(k_max + 1)])
    ratios = StepCosts(3, 16, {cell: [seconds] for cell, seconds in cells.items()}).ratios()[: k_max + 1]
    assert found[1:] == (tokens[:, None] / ratios).argmax(0).tolist() and len(found) == 17
    assert set(found) == best


def test_a_long_context_makes_drafts_pay_where_a_short_one_does_not() -> None:
    """A step that mostly reads its context costs the same with drafts; nothing pays without acceptance."""
    acceptance = Acceptance([0.3])
    for row, context, best in ((1e-6, 0, 1), (1e-3, 0, 0), (1e-3, 200_000, 1)):
        cost = Linear(step=1e-2, row=row, token=2e-7)
        assert best_lengths(cost, acceptance, 1, 64, context)[64] == best
    assert best_lengths(FREE, None, 3, 4, 0) == best_lengths(FREE, NEVER, 3, 4, 0) == [0] * 5
