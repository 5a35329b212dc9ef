"""The event loop: what holds exactly, and what was measured of a batch that drains."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cotrain.simulation.acceptance import Acceptance
from cotrain.simulation.rollout import Engines, Generation, Order, generate
from cotrain.simulation.step_time import Array, Origin
from tests.cotrain.simulation.cpu_cells import ACCEPTANCE_LENGTH, DRAINING, DRAINING_LENGTHS, best_lengths, cells_of


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

rng = np.random.default_rng(0)
LENGTHS = np.clip(rng.lognormal(5.5, 1, 48), 1, 2000).astype(int).tolist()
PROMPTS = rng.integers(1, 300, 48).tolist()
NEVER, ALWAYS, ALWAYS_ONE = Acceptance([0.0]), Acceptance([1.0]), Acceptance([1.0, 0.0])
HALF = Acceptance.from_length(2.5, 3)
BY_DEPTH = Acceptance([0.5], [(0, [0.9, 0.8]), (64, [0.5]), (300, [0.0])])
PLACES = [Engines(1, 64), Engines(3, 16), Engines(1, 8), Engines(4, 2), Engines(2, 16, kv_tokens=6000)]
"""Without a queue, on one and on three engines; with one; with one since the context is full."""


def place_id(engines: Engines) -> str:
    return f"{engines.count}x{engines.max_num_seqs}" + (" little memory" if engines.kv_tokens else "")


everywhere = pytest.mark.parametrize("engines", PLACES, ids=place_id)


def run(k: int | Sequence[int] = 0, acceptance: Acceptance | None = None, engines: Engines = PLACES[0], seed: int = 0,
        cost: Linear | None = None) -> Generation:  # fmt: skip
    return generate(cost or Linear(**USUAL), LENGTHS, PROMPTS, engines, k, acceptance, seed)


def fields(generation: Generation) -> dict[str, Any]:
    return vars(generation) | {"engine_seconds": generation.engine_seconds.tolist()}


def step_by_step(lengths: list[int], prompts: list[int], slots: int, k: list[int], kept: list[tuple[int, int]],
                 cost: Linear, kv_tokens: float) -> tuple[float, int, int]:  # fmt: skip
    """Seconds, steps and drafted tokens of one engine, a step at a time. kept: (depth, tokens that are always accepted)."""
    queue, running, clock, steps, drafted = list(range(len(lengths))), list[int](), 0.0, 0, 0
    done = [0] * len(lengths)
    while queue or running:
        new = list[int]()
        while queue and len(running) < slots:
            if sum(lengths[i] + prompts[i] for i in [*running, queue[0]]) > kv_tokens:
                break
            new.append(queue.pop(0))
            running.append(new[-1])
        clock += cost.prefill(sum(prompts[i] for i in new))
        draft = k[len(running)]
        clock += float(cost.base(draft, np.array(float(len(running)))))
        clock += cost.slope(draft) * sum(prompts[i] + done[i] for i in running)
        steps, drafted = steps + 1, drafted + draft * len(running)
        for i in running:
            accepted = [tokens for depth, tokens in kept if depth <= done[i]][-1]
            done[i] = min(lengths[i], done[i] + 1 + min(draft, accepted))
        running = [i for i in running if done[i] < lengths[i]]
    return clock, steps, drafted


@pytest.mark.parametrize("seed", range(8))
def test_the_same_as_one_step_after_another(seed: int) -> None:
    """With acceptance that leaves nothing to chance, for any lengths, k by batch size, depths, slots and memory."""
    rng = np.random.default_rng(seed)
    lengths, prompts = rng.integers(1, 90, 30).tolist(), rng.integers(0, 50, 30).tolist()
    slots, kv_tokens = int(rng.integers(1, 40)), int(rng.integers(140, 1500))
    k = rng.integers(0, 5, slots + 1).tolist()
    kept = [(0, 3), (17, 1), (40, 0), (60, 4)]
    certain = Acceptance([0.0], [(depth, [1.0] * tokens + [0.0]) for depth, tokens in kept])
    cost = Linear(**USUAL)
    found = generate(cost, lengths, prompts, Engines(1, slots, kv_tokens), k, certain)
    seconds, steps, drafted = step_by_step(lengths, prompts, slots, k, kept, cost, kv_tokens)
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert (found.steps, found.drafted, found.tokens) == (steps, drafted, sum(lengths))


def test_a_step_reads_the_context_once_however_many_tokens_it_verifies() -> None:
    """By hand: steps read 10 + 10, then 11 tokens; with one draft 10, then 12."""
    reads = Linear(step=0.0, token=1.0)
    assert generate(reads, [2, 1], 10, Engines(1, 2), 0, None).seconds == 31
    assert generate(reads, [3], 10, Engines(1, 2), 1, ALWAYS).seconds == (10 + 12) * 9 / 8


@everywhere
def test_no_speculation_is_the_same_to_the_bit_in_every_form(engines: Engines) -> None:
    plain = fields(run(0, None, engines))
    assert fields(run(0, BY_DEPTH, engines, seed=5)) == plain
    assert fields(run([0] * (engines.max_num_seqs + 1), HALF, engines)) == plain
    adaptive = best_lengths(Linear(**USUAL), NEVER, 5, engines.max_num_seqs, mean_context=500)
    assert fields(run(adaptive, NEVER, engines)) == plain


@everywhere
@pytest.mark.parametrize("k", [1, 3, 7])
def test_drafts_that_are_never_accepted_are_never_faster(engines: Engines, k: int) -> None:
    plain, drafted = run(0, None, engines), run(k, NEVER, engines)
    assert drafted.seconds > plain.seconds and drafted.steps == plain.steps
    assert run(k, NEVER, engines, cost=FREE).seconds == run(0, None, engines, cost=FREE).seconds
    assert drafted.acceptance_length == 1 and drafted.drafted == k * sum(LENGTHS)


@everywhere
@pytest.mark.parametrize("acceptance", [ALWAYS, HALF, BY_DEPTH], ids=["always", "half", "by depth"])
def test_every_token_is_generated_once_and_every_request_ends(engines: Engines, acceptance: Acceptance) -> None:
    by_batch = [(5 - batch) % 5 for batch in range(engines.max_num_seqs + 1)]
    for k in (0, 3, by_batch):
        found = run(k, acceptance, engines)
        assert found.tokens == sum(LENGTHS)
        times, running = np.array(found.timeline).T
        held = float(np.diff(times) @ running[:-1])
        assert found.mean_batch == pytest.approx(held / found.engine_seconds.sum())
        assert running[-1] == 0 and min(running) >= 0 and max(running) <= engines.count * engines.max_num_seqs
        assert found.timeline[-1][0] == found.seconds == found.engine_seconds.max()


def test_speed_up_is_at_most_the_acceptance_length_and_never_above_k_plus_one() -> None:
    for cost in (FREE, Linear(**USUAL)):
        plain = run(cost=cost).seconds
        for k, acceptance in ((1, HALF), (3, HALF), (7, HALF), (3, ALWAYS), (7, ALWAYS)):
            seconds = np.array([run(k, acceptance, seed=seed, cost=cost).seconds for seed in range(20)])
            assert plain / seconds.min() <= k + 1
            error = seconds.std() / seconds.mean() / 20**0.5
            assert 1 < plain / seconds.mean() <= acceptance.length(k) * (1 + 3 * error)


def test_on_an_infinitely_fast_machine_the_speed_up_is_the_acceptance_length() -> None:
    """And where drafts cost the host time, it is less by what they cost. One request after another."""
    lengths, one = [4000] * 16, Engines(1, 1)
    plain = generate(FREE, lengths, 100, one, 0, None).seconds
    assert plain / generate(FREE, lengths, 100, one, 3, ALWAYS).seconds == 4
    drafted = generate(FREE, lengths, 100, one, 3, HALF)
    assert plain / drafted.seconds == pytest.approx(2.5, rel=0.02)
    assert plain / drafted.seconds == pytest.approx(drafted.acceptance_length, rel=1e-3)
    assert generate(Linear(draft=0.1), lengths, 100, one, 3, HALF).seconds == pytest.approx(1.3 * drafted.seconds)


@everywhere
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_as_much_is_accepted_as_the_input_says(engines: Engines, k: int) -> None:
    found = run(k, HALF, engines)
    survival = HALF.survival(k)
    variance = ((2 * np.arange(1, k + 1) - 1) * survival).sum() - survival.sum() ** 2
    error = np.sqrt(variance / found.verified_steps)
    assert found.acceptance_length == pytest.approx(1 + survival.sum(), abs=3 * error)
    assert error < 0.025 and found.drafted == k * found.verified_steps


def test_acceptance_changes_with_depth() -> None:
    """Of 1000 tokens the first 500 take 250 steps and the others 500, whatever the batch."""
    falling = Acceptance([0.5], [(0, [1.0]), (500, [0.0])])
    for lengths in ([1000], [1000] * 5):
        assert generate(FREE, lengths, 0, Engines(1, 8), 1, falling).seconds == 750


def test_order_of_requests_that_run_at_once_changes_nothing() -> None:
    order = np.random.default_rng(3).permutation(len(LENGTHS))
    for k, acceptance in ((0, None), (3, HALF), ([0, *[1, 2, 3] * 22], BY_DEPTH)):
        mixed = generate(
            Linear(**USUAL), [LENGTHS[i] for i in order], [PROMPTS[i] for i in order], PLACES[0], k, acceptance
        )
        assert fields(mixed) == fields(run(k, acceptance))


@everywhere
def test_scaling_all_times_scales_the_answer(engines: Engines) -> None:
    once, twice = (run(3, HALF, engines, cost=Linear(**{n: f * s for n, s in USUAL.items()})) for f in (1, 2))
    assert twice.seconds == 2 * once.seconds and twice.steps == once.steps
    assert [time for time, _ in twice.timeline] == [2 * time for time, _ in once.timeline]
    assert twice.busy == once.busy and 0 < once.busy <= 1


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("k", [0, 3])
def test_a_queue_takes_at_least_its_tokens_at_the_peak_rate(slots: int, k: int) -> None:
    found = run(k, ALWAYS, Engines(1, slots))
    batches = np.arange(1.0, slots + 1)
    peak = ((k + 1) * batches / Linear(**USUAL).base(k, batches)).max()
    assert sum(LENGTHS) / peak <= found.seconds <= 1.6 * sum(LENGTHS) / peak


def test_more_engines_or_slots_are_not_slower_where_the_batch_costs_nothing() -> None:
    seconds = [
        run(0, None, Engines(count, slots), cost=FREE).seconds for count, slots in ((1, 1), (1, 8), (2, 8), (8, 8))
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == sum(LENGTHS) and seconds[-1] == max(LENGTHS)


def test_a_request_that_no_engine_holds_is_refused_and_others_wait() -> None:
    with pytest.raises(ValueError, match=r"1101 tokens does not fit: an engine holds 1100 \(kv_tokens\)"):
        generate(FREE, [1000, 1001], 100, Engines(2, 4, kv_tokens=1100), 0, None)
    lengths = [1000] * 8
    assert generate(FREE, lengths, 100, Engines(1, 8, kv_tokens=2200), 0, None).seconds == 4000
    assert generate(FREE, lengths, 100, Engines(1, 8, kv_tokens=8800), 0, None).seconds == 1000


def test_groups_are_dealt_out_in_turn_and_the_longest_may_begin_first() -> None:
    def seconds(samples: int, order: Order = "drawn") -> list[float]:
        lengths = [2, 2, 1, 3, 9, 9, 1, 2]
        return generate(FREE, lengths, 0, Engines(2, 2), 0, None, order=order, samples=samples).engine_seconds.tolist()

    assert seconds(2) == [11, 4]
    assert seconds(2, "longest_first") == [12, 4]
    assert seconds(1) == [10, 11]
    assert seconds(1, "longest_first") == [9, 9]


def test_input_that_does_not_fit_together_is_refused() -> None:
    for lengths, prompts in (([], 1), ([0], 1), ([5], -1)):
        with pytest.raises(ValueError, match="at least one response"):
            generate(FREE, lengths, prompts, Engines(1, 1), 0, None)
    with pytest.raises(ValueError, match="0 to 4 requests"):
        generate(FREE, [5] * 4, 1, Engines(1, 4), [1, 1, 1, 1], HALF)
    with pytest.raises(ValueError, match="unknown acceptance"):
        generate(FREE, [5], 1, Engines(1, 1), 1, None)
    for count, slots in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Engines(count, slots)


@pytest.mark.parametrize("drafter", DRAINING)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_fixed_batches_predict_the_speed_up_of_a_batch_that_drains(drafter: str, k: int) -> None:
    acceptance = Acceptance.from_length(ACCEPTANCE_LENGTH[drafter][k], k)
    cost, engine = cells_of(drafter, k), Engines(1, 16)
    plain = generate(cost, DRAINING_LENGTHS, 0, engine, 0, None).seconds
    drafted = [generate(cost, DRAINING_LENGTHS, 0, engine, k, acceptance, seed).seconds for seed in range(60)]
    measured, error = DRAINING[drafter][k]
    assert np.mean(plain / np.array(drafted)) == pytest.approx(measured, abs=max(0.05 * measured, 2 * error))
