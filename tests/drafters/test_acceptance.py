"""Acceptance lengths against brute force and simulation."""

import pytest
import torch

from drafters.acceptance import acceptance_length, expected_acceptance_length, mean_acceptance

NAN = float("nan")


def test_expected_length_equals_brute_force():
    acceptance = torch.rand(4, 30, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for start in acceptance.T.tolist():
        # Exactly n drafts are accepted: n acceptances and then a rejection, or all of them.
        for accepted in range(5):
            probability = 1.0
            for position in range(accepted):
                probability *= start[position]
            if accepted < 4:
                probability *= 1 - start[accepted]
            expected += (1 + accepted) * probability / 30
    assert expected_acceptance_length(acceptance) == pytest.approx(expected)


def test_expected_length_equals_simulation():
    generator = torch.Generator().manual_seed(0)
    acceptance = torch.rand(3, 40, generator=generator)
    accepted = torch.rand(20_000, 3, 40, generator=generator) < acceptance
    simulated = 1 + accepted.int().cumprod(1).sum(1).double().mean()
    assert expected_acceptance_length(acceptance) == pytest.approx(float(simulated), abs=0.01)


def test_correlated_positions_are_not_multiplied_as_means():
    acceptance = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert expected_acceptance_length(acceptance) == 2.0
    assert mean_acceptance(acceptance).tolist() == [0.5, 1.0]


def test_unknown_positions_count_neither_for_nor_against():
    acceptance = torch.tensor([[0.5, 0.5], [0.4, NAN], [NAN, NAN]])
    assert expected_acceptance_length(acceptance) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    torch.testing.assert_close(mean_acceptance(acceptance), torch.tensor([0.5, 0.4, 0.0], dtype=torch.float64))


def test_positions_after_an_unknown_one_are_unknown():
    assert expected_acceptance_length(torch.tensor([[0.5], [NAN], [1.0]])) == pytest.approx(1.5)


def test_nothing_known():
    assert expected_acceptance_length(torch.empty(3, 0)) == 1.0
    assert mean_acceptance(torch.empty(3, 0)).tolist() == [0.0, 0.0, 0.0]


def test_length_from_counts():
    assert acceptance_length(10, (6, 3, 1)) == 2.0
    assert acceptance_length(0, (0, 0)) == 1.0
