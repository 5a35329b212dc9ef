import math
from dataclasses import replace

import pytest
import torch
from policy_cases import ROLLOUT, make_rollouts
from torch import Tensor

from cotrain.config import PolicyConfig
from cotrain.policy.batching import micro_batches
from cotrain.policy.losses import Normaliser, kl_estimate, policy_loss
from cotrain.records import ScoredRollout

CPU = torch.device("cpu")


def slow_loss(
    config: PolicyConfig, rollouts: list[ScoredRollout], log_probs: list[Tensor], references: list[Tensor]
) -> Tensor:
    """One scalar at a time, as the papers write it."""
    sequence_terms = []
    for scored, current, reference in zip(rollouts, log_probs, references, strict=True):
        old = scored.rollout.log_probs
        length = len(old)
        if config.importance_ratio == "sequence":
            mean = sum(current[t] - old[t] for t in range(length)) / length
            ratios = [torch.exp(mean)] * length
        else:
            ratios = [torch.exp(current[t] - old[t]) for t in range(length)]
        tokens = []
        for t in range(length):
            clipped = torch.clamp(ratios[t], 1 - config.clip_low, 1 + config.clip_high)
            surrogate = torch.minimum(ratios[t] * scored.advantage, clipped * scored.advantage)
            delta = reference[t] - current[t]
            kl = {"k1": -delta, "k2": delta**2 / 2, "k3": torch.exp(delta) - delta - 1}[config.kl_estimator]
            tokens.append(-surrogate + config.kl_coefficient * kl)
        sequence_terms.append(tokens)
    if config.loss_aggregation == "token_mean":
        return sum(sum(tokens) for tokens in sequence_terms) / sum(len(tokens) for tokens in sequence_terms)
    if config.loss_aggregation == "seq_mean_token_mean":
        return sum(sum(tokens) / len(tokens) for tokens in sequence_terms) / len(sequence_terms)
    return sum(sum(tokens) / ROLLOUT.max_new_tokens for tokens in sequence_terms) / len(sequence_terms)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_loss_and_gradient_equal_a_slow_loop(tiny_model: str, aggregation: str, ratio: str, estimator: str) -> None:
    config = PolicyConfig(
        model="tiny",
        loss_aggregation=aggregation,
        importance_ratio=ratio,
        kl_estimator=estimator,
        kl_coefficient=0.3,
        clip_low=0.05,
        clip_high=0.08,
    )
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, "packed", CPU)
    generator = torch.Generator().manual_seed(1)
    current = batch.behaviour_log_probs.double() + 0.3 * torch.randn(len(batch.targets), generator=generator)
    reference = current + 0.3 * torch.randn(len(current), generator=generator)
    normaliser = Normaliser(len(batch.targets), len(batch.rollouts), ROLLOUT.max_new_tokens)

    fast_input = current.clone().requires_grad_()
    result = policy_loss(config, normaliser, batch, fast_input, reference)
    result.loss.backward()

    slow_input = current.clone().requires_grad_()
    lengths = batch.lengths.tolist()
    loss = slow_loss(config, batch.rollouts, list(slow_input.split(lengths)), list(reference.split(lengths)))
    loss.backward()

    assert result.clipped.any() and not result.clipped.all()
    torch.testing.assert_close(result.loss, loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fast_input.grad, slow_input.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.per_token.sum(), result.loss.detach())


def test_without_old_log_probs_the_ratio_is_one_and_still_has_a_gradient(tiny_model: str) -> None:
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, "packed", CPU)
    log_probs = (batch.behaviour_log_probs - 0.5).requires_grad_()
    normaliser = Normaliser(len(batch.targets), len(batch.rollouts), ROLLOUT.max_new_tokens)
    result = policy_loss(PolicyConfig(model="t"), normaliser, replace(batch, old_log_probs=None), log_probs, None)
    result.loss.backward()
    assert (result.ratio == 1).all()
    torch.testing.assert_close(log_probs.grad, -batch.advantages / len(batch.targets))


def test_kl_estimates_average_to_the_kl() -> None:
    policy, reference = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1).double()
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k3"):
        assert float((policy.exp() * kl_estimate(policy, reference, estimator)).sum()) == pytest.approx(exact)
    assert math.isclose(float(kl_estimate(policy, policy, "k3").abs().max()), 0.0)
