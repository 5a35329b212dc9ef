"""Cost model, acceptance model and the rule, each by itself."""

import numpy as np
import pytest

from cotrain.rollout.speculation.draft_length_policy import Gains, choose, gains, trial_lengths, undecided
from cotrain.rollout.speculation.served_acceptance import KEPT_AFTER_SWAP, ServedAcceptance
from cotrain.rollout.speculation.step_cost import StepCostModel, default_batch_sizes
from tests.cotrain.rollout.simulated_engine import CPU, GOOD, GPU, K, Shape, expected_tokens


def timed(shape: Shape, max_batch: int = 32) -> StepCostModel:
    model = StepCostModel(K, max_batch)
    model.learn_timings(
        [(k, b, [shape.seconds(k, k, b)]) for b in default_batch_sizes(max_batch) for k in range(K + 1)] * 3
    )
    return model


@pytest.mark.parametrize("shape", [CPU, GPU], ids=["CPU", "GPU"])
def test_timings_are_kept_and_interpolated(shape: Shape) -> None:
    seconds = timed(shape).seconds()
    for batch in (1, 2, 4, 8, 16, 32):
        expected = [shape.seconds(k, k, batch) for k in range(K + 1)]
        assert seconds[:, batch - 1] == pytest.approx(expected, rel=0.05 if batch in (1, 4, 16, 32) else 0.15)
    assert (np.diff(seconds, axis=1) >= 0).all(), "never falling with the batch size"


def test_times_never_fall_with_the_batch_size_whatever_was_timed() -> None:
    model = StepCostModel(1, 16)
    model.learn_timings([(k, b, [t]) for b, t in ((1, 0.012), (4, 0.009), (16, 0.02)) for k in (0, 1)])
    assert (np.diff(model.seconds(), axis=1) >= -1e-12).all()


def test_bad_timings_are_refused() -> None:
    for timing in ((0, 1, [0.1, 0.0]), (0, 1, [float("nan")]), (0, 1, []), (4, 1, [0.1]), (0, 33, [0.1])):
        with pytest.raises(ValueError, match="positive times"):
            StepCostModel(K, 32).learn_timings([timing])


def test_a_burst_that_slows_some_timings_moves_no_ratio() -> None:
    """Two of three timings of one cell, all their steps, by half."""
    timings = [
        (k, b, [CPU.seconds(k, k, b) * (1.5 if (k, b) == (0, 4) and repeat else 1.0)] * 8)
        for repeat in range(3)
        for b in default_batch_sizes(32)
        for k in range(K + 1)
    ]
    disturbed = StepCostModel(K, 32)
    disturbed.learn_timings(timings)
    ratios, expected = (model.seconds()[2] / model.seconds()[0] for model in (disturbed, timed(CPU)))
    assert ratios[3] == pytest.approx(expected[3], rel=0.05)


def test_outliers_hardly_move_it_and_a_lasting_change_does() -> None:
    random, model = np.random.default_rng(0), timed(CPU)

    def ratio() -> float:
        seconds = model.seconds()
        return float(seconds[2, 3] / seconds[0, 3])

    true = ratio()
    for i in range(600):
        k = 0 if i % 20 < 10 else 2
        late = 10.0 if random.random() < 0.05 else 1.0
        model.observe(k, 4, late * CPU.seconds(k, k, 4) * float(np.exp(0.15 * random.standard_normal())))
    assert ratio() == pytest.approx(true, rel=0.08)
    for i in range(1500):
        k = 0 if i % 20 < 10 else 2
        model.observe(k, 4, CPU.seconds(k, k, 4) * (0.7 if k else 1.0) * float(np.exp(0.1 * random.standard_normal())))
    assert ratio() == pytest.approx(0.7 * true, rel=0.08)


def test_a_slower_machine_moves_the_times_and_not_the_ratios() -> None:
    model = timed(CPU)
    before = model.seconds()
    for _ in range(200):
        model.observe(0, 4, 3 * CPU.seconds(0, 0, 4))
    after = model.seconds()
    assert after[0, 3] == pytest.approx(3 * before[0, 3], rel=0.05)
    assert after[2] / after[0] == pytest.approx(before[2] / before[0], rel=0.05)


def test_a_busy_spell_during_one_trial_does_not_decide() -> None:
    model = timed(CPU)

    def ratio() -> float:
        seconds = model.seconds()[:, 3]
        return float(seconds[2] / seconds[0])

    before, random = ratio(), np.random.default_rng(0)
    for k, pace, steps in ((2, 1.0, 100), (0, 0.8, 7)):
        for _ in range(steps):
            model.observe(k, 4, pace * float(np.exp(0.1 * random.standard_normal())) * CPU.seconds(k, k, 4))
    assert ratio() == pytest.approx(before, rel=0.065)


def test_a_length_not_run_for_long_becomes_uncertain() -> None:
    model = timed(CPU)
    before = model.ratio_error()[2, 3]
    for _ in range(20_000):
        model.observe(0, 4, CPU.seconds(0, 0, 4))
    assert model.ratio_error()[2, 3] > 1.5 * before


def serve(acceptance: ServedAcceptance, rates: tuple[float, ...], batch: int, k: int, steps: int, seed: int = 0) -> int:
    """Serve at length k; the number of sudden changes noticed."""
    random, changes = np.random.default_rng(seed), 0
    for _ in range(steps):
        reached = np.cumprod(random.random((batch, k)) < np.array(rates[:k]), axis=1)
        accepted = [*reached.sum(0), *[0] * (K - k)]
        changes += acceptance.observe(batch, [batch, *accepted[: k - 1], *[0] * (K - k)], accepted)
    return changes


def test_what_is_served_at_one_length_predicts_the_others() -> None:
    acceptance = ServedAcceptance(K, 32, 2000)
    serve(acceptance, GOOD, 16, 3, 200)
    lengths, errors = acceptance.tokens_per_step()
    assert lengths[:, 15] == pytest.approx([expected_tokens(GOOD, k) for k in range(K + 1)], rel=0.04)
    assert errors[0, 15] == 0 and errors[3, 15] < 0.03
    assert lengths[:, 0] == pytest.approx(lengths[:, 15], rel=0.02), "batch 1 leans on what batch 16 has shown"
    assert errors[3, 0] > errors[3, 15]


def test_positions_not_drafted_lately_lean_on_the_one_before_and_become_uncertain() -> None:
    acceptance = ServedAcceptance(K, 1, 200)
    serve(acceptance, (0.8, 0.8, 0.1), 1, 3, 2000)
    rates, weights = acceptance.rates()
    assert rates[0, 2] < 0.2
    serve(acceptance, (0.8, 0.8, 0.1), 1, 1, 4000)
    assert acceptance.rates()[0][0, 2] > 0.6 and acceptance.rates()[1][0, 2] < weights[0, 2] / 10


def test_the_last_requests_of_a_batch_may_differ() -> None:
    acceptance = ServedAcceptance(K, 16, 2000)
    serve(acceptance, GOOD, 16, 2, 100)
    serve(acceptance, (0.3, 0.2, 0.2), 1, 2, 1500)
    lengths, _ = acceptance.tokens_per_step()
    assert lengths[2, 0] == pytest.approx(1.36, rel=0.08) and lengths[2, 15] > 1.8


def test_a_sudden_change_is_noticed_and_noise_is_not() -> None:
    acceptance = ServedAcceptance(K, 16, 2000)
    assert serve(acceptance, GOOD, 1, 3, 5000) <= 1
    assert serve(acceptance, (0.05, 0.05, 0.05), 1, 3, 60, seed=1) >= 1
    assert acceptance.tokens_per_step()[0][3, 0] < 1.5


def test_evidence_of_an_older_drafter_weighs_little_and_a_promise_replaces_it() -> None:
    acceptance = ServedAcceptance(K, 16, 2000)
    serve(acceptance, GOOD, 16, 3, 200)
    acceptance.new_drafter(KEPT_AFTER_SWAP)
    assert acceptance.rates()[1][:, 0].max() <= KEPT_AFTER_SWAP + 5
    assert acceptance.tokens_per_step()[0][3, 0] == pytest.approx(expected_tokens(GOOD, 3), rel=0.05)
    acceptance.new_drafter(KEPT_AFTER_SWAP, expected_rates=[0.2, 0.05, 0.0])
    assert acceptance.tokens_per_step()[0][3, 0] == pytest.approx(1.25, rel=0.03)
    acceptance.new_drafter(KEPT_AFTER_SWAP, expected_rates=[0.6])
    rates, weights = acceptance.rates()
    assert rates[0] == pytest.approx([0.6] * 3, abs=0.02), "positions beyond a promise lean on the last one of it"
    assert weights[0, 1] < 10 < weights[0, 0]


def gain(estimate: list[float], width: float) -> Gains:
    """One batch size; log gains of lengths 1, 2, ..."""
    values, half = np.array([[0.0], *[[v] for v in estimate]]), np.array([[0.0]] + [[width]] * len(estimate))
    return Gains(values, values - half, values + half, values + 1)


@pytest.mark.parametrize(
    ("current", "estimate", "width", "expected"),
    [
        (0, [0.10, 0.20], 0.05, 2),
        (0, [0.10, 0.20], 0.25, 0),  # pays by the estimate, not by the lower bound
        (0, [0.055], 0.05, 0),  # by less than the hysteresis
        (1, [0.055], 0.05, 1),  # enough to stay on
        (1, [0.005], 0.05, 1),  # not certain any more, but learnt about fastest where it is
        (1, [-0.005], 0.05, 0),  # costs, by the estimate
        (1, [0.20, 0.205], 0.05, 1),  # not worth a change
        (1, [0.20, 0.22], 0.05, 2),
        (2, [0.30, -0.20], 0.05, 1),
    ],
)
def test_choice(current: int, estimate: list[float], width: float, expected: int) -> None:
    assert choose(np.array([current]), gain(estimate, width), hysteresis=0.01).tolist() == [expected]


def test_what_is_timed_again() -> None:
    assert undecided(gain([0.3, 0.1], 0.05), 0.01) == [[]]
    assert undecided(gain([-0.3, -0.1], 0.05), 0.01) == [[]]
    assert undecided(gain([0.3, 0.28], 0.05), 0.01) == [[0, 1, 2]]
    assert undecided(gain([0.03, -0.2], 0.05), 0.01) == [[0, 1]]


def test_what_is_tried() -> None:
    never = np.zeros((3, 1), np.int64)
    off, on = np.array([0]), np.array([2])
    assert trial_lengths(off, gain([-0.1, -0.2], 0.05), never).tolist() == [1]
    assert trial_lengths(off, gain([-1.5, -1.2], 0.05), never).tolist() == [-1], "even a perfect drafter would cost"
    assert trial_lengths(on, gain([0.1, 0.3], 0.05), never).tolist() == [0]
    assert trial_lengths(on, gain([0.28, 0.3], 0.05), np.array([[9], [4], [7]])).tolist() == [1]


def test_gain_is_tokens_over_time() -> None:
    tokens = (np.array([[1.0], [1.5]]), np.array([[0.0], [0.03]]))
    result = gains(tokens, np.array([[0.02], [0.025]]), np.array([[0.0], [0.04]]), z=2.0)
    assert np.exp(result.estimate[1, 0]) == pytest.approx(1.2)
    assert result.upper[1, 0] - result.lower[1, 0] == pytest.approx(4 * 0.05)
    assert np.exp(result.ceiling[1, 0]) == pytest.approx(1.6 * np.exp(0.08)) and result.lower[0, 0] == 0
