import pytest

from cotrain.policy.losses import group_advantages


def test_mean_baseline_in_the_order_given() -> None:
    assert group_advantages([1.0, 2.0, 6.0], "group_mean") == [-2.0, -1.0, 3.0]


def test_std_is_the_sample_standard_deviation() -> None:
    advantages = group_advantages([1.0, 2.0, 6.0], "group_mean_std")
    assert advantages == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5], rel=1e-5)


@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std"])
def test_equal_rewards_give_exactly_zero(kind: str) -> None:
    # The mean of three times 0.1 is not exactly 0.1.
    assert group_advantages([0.1, 0.1, 0.1], kind) == [0.0, 0.0, 0.0]
