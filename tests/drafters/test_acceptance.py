"""Acceptance lengths against brute force, and against a simulated engine."""

import math

import numpy as np
import pytest
import torch

from drafters.acceptance import StartAcceptance, rollout_acceptance
from tests.drafters.conftest import acceptance_length

NAN = float("nan")
VOCABULARY, DEPTH = 6, 4


def starts(probability, drawn=None, rollout=None, offset=None) -> StartAcceptance:
    probability = torch.tensor(probability)
    count = probability.shape[1]
    return StartAcceptance(
        probability,
        probability if drawn is None else torch.tensor(drawn),
        torch.zeros(count, dtype=torch.int64) if rollout is None else torch.tensor(rollout),
        torch.arange(count) if offset is None else torch.tensor(offset),
    )


class World:
    """A target and a drafter that look one token back: p [V, V], and q [K, V, V] of each draft position."""

    def __init__(self, peakedness: float):
        generator = torch.Generator().manual_seed(0)
        self.p = (torch.randn(VOCABULARY, VOCABULARY, generator=generator).double() * peakedness).softmax(-1)
        noise = torch.randn(DEPTH, VOCABULARY, VOCABULARY, generator=generator).double()
        self.q = (self.p.log() + noise * torch.tensor([0.5, 1.0, 1.5, 2.0])[:, None, None]).softmax(-1)

    def sample(self, num: int, length: int, seed: int) -> torch.Tensor:
        """Rollouts [num, length] of the target alone."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.zeros(num, length, dtype=torch.int64)
        for i in range(1, length):
            tokens[:, i] = torch.multinomial(self.p[tokens[:, i - 1]], 1, generator=generator)[:, 0]
        return tokens

    def starts(self, tokens: torch.Tensor, greedy: bool) -> StartAcceptance:
        """What a forward of target and drafter over the rollouts knows. Draft position k after input token i+k."""
        num, length = tokens.shape
        probability = torch.full((DEPTH, num, length - 1), NAN, dtype=torch.float64)
        drawn = probability.clone()
        for k in range(DEPTH):
            seen, drawn_next = tokens[:, k : length - 1], tokens[:, k + 1 :]
            p, q = self.p[seen], self.q[k][seen]
            if greedy:
                probability[k, :, : length - 1 - k] = p.gather(-1, q.argmax(-1, keepdim=True))[..., 0]
                drawn[k, :, : length - 1 - k] = (q.argmax(-1) == drawn_next).double()
            else:
                probability[k, :, : length - 1 - k] = torch.minimum(p, q).sum(-1)
                ratio = q.gather(-1, drawn_next[..., None]) / p.gather(-1, drawn_next[..., None])
                drawn[k, :, : length - 1 - k] = ratio[..., 0].clamp(max=1)
        rollout = torch.arange(num)[:, None].expand(num, length - 1).flatten()
        offset = torch.arange(length - 1).repeat(num)
        return StartAcceptance(probability.flatten(1), drawn.flatten(1), rollout, offset)

    def serve(self, num: int, length: int, num_speculative_tokens: int, greedy: bool, seed: int) -> float:
        """Acceptance length of an engine that drafts, verifies and resamples, request by request."""
        generator = torch.Generator().manual_seed(seed)

        def draw(weights: torch.Tensor) -> int:
            return int(torch.multinomial(weights, 1, generator=generator))

        num_steps = num_accepted = 0
        for _ in range(num):
            token, generated = 0, 1
            while generated < length:
                num_steps += 1
                for k in range(num_speculative_tokens + 1):
                    p = self.p[token]
                    if k == num_speculative_tokens:
                        token = draw(p)
                        break
                    q = self.q[k][token]
                    if greedy:
                        q = torch.nn.functional.one_hot(q.argmax(), VOCABULARY).double()
                    draft = draw(q)
                    if float(torch.rand((), generator=generator)) >= float(p[draft] / q[draft]):
                        token = draw((p - q).clamp(min=0))
                        break
                    token, num_accepted = draft, num_accepted + 1
                generated += 1 + min(k, num_speculative_tokens)
        return 1 + num_accepted / num_steps


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 4])
def test_expected_length_is_what_an_engine_serves(num_speculative_tokens, greedy):
    world = World(peakedness=1.5)
    expected = acceptance_length([world.starts(world.sample(4000, 40, seed=1), greedy)], num_speculative_tokens)
    served = world.serve(600, 40, num_speculative_tokens, greedy, seed=2)
    assert expected == pytest.approx(served, rel=0.02)


def test_starting_at_every_position_alike_overstates_it():
    """Half of the rollouts are easy to draft, half hard: more steps are taken in the hard ones."""
    tokens = 60
    easy, hard = [[1.0] * tokens] * 3, [[0.0] * tokens] * 3
    both = starts(torch.cat([torch.tensor(easy), torch.tensor(hard)], dim=1).tolist(), None, [0] * 60 + [1] * 60,
                  [*range(60), *range(60)])  # fmt: skip
    # 60 tokens in 15 steps of 4, and in 60 steps of 1.
    assert acceptance_length([both], 3) == pytest.approx(120 / 75)
    assert both.probability.mean(1).tolist() == [0.5, 0.5, 0.5]  # which would say 1 + 3 x 0.5


def test_one_step_equals_brute_force():
    acceptance = [0.9, 0.5, 0.2]
    expected = 0.0
    for accepted in range(4):
        probability = math.prod(acceptance[:accepted])
        expected += (1 + accepted) * probability * (1 if accepted == 3 else 1 - acceptance[accepted])
    found = acceptance_length([starts([[a] for a in acceptance])], 3)
    assert found == pytest.approx(expected)


def test_positions_beyond_the_end_have_the_mean_of_their_position():
    both = starts([[0.5, 0.5], [0.25, NAN]])
    assert rollout_acceptance([both], 2).rates()[1] == pytest.approx(0.5 * 0.25)


def test_rollouts_with_a_hole_and_starts_in_the_prompt_are_left_out():
    whole = starts([[0.5, 0.5, 0.5]], rollout=[0, 0, 0])
    with_prompt = starts([[1.0, 0.5, 0.5, 0.5]], rollout=[0] * 4, offset=[-1, 0, 1, 2])
    with_hole = starts([[0.5, 0.5, 0.5, 1.0]], rollout=[0, 0, 0, 1], offset=[0, 1, 2, 3])
    rates = rollout_acceptance([whole], 1).rates()
    assert rollout_acceptance([with_prompt], 1).rates() == rates == rollout_acceptance([with_hole], 1).rates() == [0.5]


def test_rollouts_of_several_batches_count_together():
    easy, hard = starts([[1.0] * 4]), starts([[0.0] * 4])
    assert acceptance_length([easy, hard], 1) == pytest.approx(8 / 6)


def test_rollouts_one_by_one_add_up_to_the_rates():
    world = World(peakedness=1.5)
    parts = [world.starts(world.sample(5, length, seed=length), greedy=False) for length in (12, 20)]
    rollouts = rollout_acceptance(parts, 3)
    assert rollouts.accepted.shape == (10, 3)
    assert (rollouts.accepted.sum(0) / rollouts.steps.sum()).tolist() == pytest.approx(rollouts.rates())
    assert rollouts.known.tolist() == [2 * (11 + 10 + 9)] * 5 + [2 * (19 + 18 + 17)] * 5


def test_a_rollout_left_out_keeps_its_row():
    broken = starts([[0.5, NAN, 0.5, 1.0, 1.0]], rollout=[0, 0, 1, 2, 2], offset=[0, 1, 0, 0, 1])
    last = starts([[0.25]], rollout=[1])
    rollouts = rollout_acceptance([broken, last], 1)
    assert np.isnan(rollouts.steps).tolist() == [True, False, False, True, False]
    assert rollouts.accepted[[1, 2, 4], 0].tolist() == [0.5, 1.0, 0.25]
    assert rollouts.known.tolist() == [0, 2, 4, 0, 2]


def test_nothing_known():
    assert rollout_acceptance([], 3).rates() == []
    assert rollout_acceptance([starts(torch.empty(3, 0).tolist())], 3).rates() == []
    assert acceptance_length([starts([[NAN], [NAN]])], 2) == 1.0
