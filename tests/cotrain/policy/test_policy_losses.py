import math
from dataclasses import replace

import pytest
import torch
from policy_cases import ROLLOUT, make_rollouts
from torch import Tensor

from cotrain.config.schema import PolicyConfig
from cotrain.policy.batching import MicroBatch, micro_batches
from cotrain.policy.losses import kl_estimate, loss_denominator, policy_loss
from cotrain.records import Rollout, ScoredRollout, Versions

CPU = torch.device("cpu")


def denominator(config: PolicyConfig, batch: MicroBatch) -> int:
    """That of a minibatch of this micro-batch alone."""
    return loss_denominator(config, batch.lengths.tolist(), ROLLOUT.max_new_tokens)


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
            tokens.append(-surrogate + config.kl_coefficient * (torch.exp(delta) - delta - 1))
        sequence_terms.append(tokens)
    if config.loss_aggregation == "token_mean":
        return sum(sum(tokens) for tokens in sequence_terms) / sum(len(tokens) for tokens in sequence_terms)
    if config.loss_aggregation == "seq_mean_token_mean":
        return sum(sum(tokens) / len(tokens) for tokens in sequence_terms) / len(sequence_terms)
    return sum(sum(tokens) / ROLLOUT.max_new_tokens for tokens in sequence_terms) / len(sequence_terms)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_loss_and_gradient_equal_a_slow_loop(tiny_model: str, aggregation: str, ratio: str) -> None:
    config = PolicyConfig(
        model="tiny",
        loss_aggregation=aggregation,
        importance_ratio=ratio,
        kl_coefficient=0.3,
        clip_low=0.05,
        clip_high=0.08,
    )
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, CPU)
    generator = torch.Generator().manual_seed(1)
    current = batch.behaviour_log_probs.double() + 0.3 * torch.randn(len(batch.targets), generator=generator)
    reference = current + 0.3 * torch.randn(len(current), generator=generator)

    fast_input = current.clone().requires_grad_()
    per_token, values = policy_loss(config, denominator(config, batch), batch, fast_input, reference)
    per_token.sum().backward()

    slow_input = current.clone().requires_grad_()
    lengths = batch.lengths.tolist()
    loss = slow_loss(config, batch.rollouts, list(slow_input.split(lengths)), list(reference.split(lengths)))
    loss.backward()

    log_ratio = current - batch.behaviour_log_probs
    if ratio == "sequence":
        log_ratio = torch.cat([part.mean().expand(len(part)) for part in log_ratio.split(lengths)])
    above, below = log_ratio.exp() > 1 + config.clip_high, log_ratio.exp() < 1 - config.clip_low
    assert torch.equal(values["clip_fraction"], torch.where(batch.advantages > 0, above, below))
    assert values["clip_fraction"].any() and not values["clip_fraction"].all()
    torch.testing.assert_close(per_token.sum(), loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fast_input.grad, slow_input.grad, rtol=1e-5, atol=1e-7)


def test_without_old_log_probs_the_ratio_is_one_and_still_has_a_gradient(tiny_model: str) -> None:
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, CPU)
    log_probs = (batch.behaviour_log_probs - 0.5).requires_grad_()
    config = PolicyConfig(model="t")
    without_old = replace(batch, old_log_probs=None)
    per_token, values = policy_loss(config, denominator(config, batch), without_old, log_probs, None)
    per_token.sum().backward()
    assert (values["ratio_max"] == 1).all()
    torch.testing.assert_close(log_probs.grad, -batch.advantages / len(batch.targets))


def slow_corrected_loss(
    config: PolicyConfig,
    rollouts: list[ScoredRollout],
    log_probs: list[Tensor],
    olds: list[list[float]],
    references: list[Tensor],
) -> tuple[Tensor, list[float]]:
    """The loss under a behaviour correction, one scalar at a time, and the weight of each token."""
    sequence_terms, weights = [], []
    for scored, current, old, reference in zip(rollouts, log_probs, olds, references, strict=True):
        tokens = []
        for t, behaviour in enumerate(scored.rollout.log_probs):
            weight = math.exp(max(-20.0, min(20.0, old[t] - behaviour)))
            if config.behaviour_correction == "truncate":
                weight = min(weight, config.behaviour_cap)
            elif not 1 / config.behaviour_cap <= weight <= config.behaviour_cap:
                weight = 0.0
            ratio = torch.exp(current[t] - old[t])
            clipped = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
            surrogate = torch.minimum(ratio * scored.advantage, clipped * scored.advantage)
            delta = reference[t] - current[t]
            tokens.append(-weight * surrogate + config.kl_coefficient * (torch.exp(delta) - delta - 1))
            weights.append(weight)
        sequence_terms.append(tokens)
    if config.loss_aggregation == "token_mean":
        # The denominators count the masked tokens too.
        return sum(sum(tokens) for tokens in sequence_terms) / sum(map(len, sequence_terms)), weights
    return sum(sum(tokens) / len(tokens) for tokens in sequence_terms) / len(sequence_terms), weights


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_corrected_loss_and_gradient_equal_a_slow_loop(
    tiny_model: str, correction: str, minibatches: int, aggregation: str
) -> None:
    config = PolicyConfig(
        model="tiny",
        old_log_probs="recomputed",
        behaviour_correction=correction,
        behaviour_cap=1.3,
        loss_aggregation=aggregation,
        kl_coefficient=0.3,
        clip_low=0.05,
        clip_high=0.08,
    )
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, CPU)
    generator = torch.Generator().manual_seed(1)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(batch.targets), generator=generator, dtype=torch.float64)

    old = batch.behaviour_log_probs + noise(0.3)
    old[3] = batch.behaviour_log_probs[3] + 30.0  # an engine and a learner that know nothing of each other
    current = old.clone() if minibatches == 1 else old + noise(0.1)
    reference = current + noise(0.3)

    fast_input = current.clone().requires_grad_()
    # With one minibatch the learner has no log-probs of an earlier forward pass: they are the current ones, detached.
    with_old = replace(batch, old_log_probs=None if minibatches == 1 else old)
    per_token, values = policy_loss(config, denominator(config, batch), with_old, fast_input, reference)
    per_token.sum().backward()

    slow_input = current.clone().requires_grad_()
    lengths = batch.lengths.tolist()
    olds = [part.tolist() for part in old.split(lengths)]
    loss, weights = slow_corrected_loss(
        config, batch.rollouts, list(slow_input.split(lengths)), olds, list(reference.split(lengths))
    )
    loss.backward()

    torch.testing.assert_close(per_token.sum(), loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fast_input.grad, slow_input.grad, rtol=1e-5, atol=1e-7)
    weight, ratio = values["behaviour_weight_mean"], values["behaviour_ratio_mean"]
    assert not weight.requires_grad
    torch.testing.assert_close(weight, torch.tensor(weights, dtype=torch.float64), rtol=1e-5, atol=0)
    limited = torch.tensor(weights) == (1.3 if correction == "truncate" else 0.0)
    found = values["behaviour_capped" if correction == "truncate" else "behaviour_masked"]
    assert torch.equal(found, limited) and limited.any() and not limited.all()
    torch.testing.assert_close(ratio[3], torch.tensor(math.exp(20.0), dtype=torch.float64))


def test_a_correction_takes_away_the_bias_of_another_behaviour_policy() -> None:
    """Every token of a vocabulary of three, as often as the engine draws it, so that the mean is the expectation."""
    policy = torch.tensor([0.2, 0.2, 0.6]).log()
    behaviour = [0.25, 0.25, 0.5]
    advantages = [1.0, -0.5, 0.3]
    drawn = [0, 1, 2, 2]
    rollouts = [
        ScoredRollout(
            Rollout("p", index, [0], [token], [math.log(behaviour[token])], "", "stop", Versions(0, 0)),
            reward=0.0,
            advantage=advantages[token],
        )
        for index, token in enumerate(drawn)
    ]
    (batch,) = micro_batches(rollouts, 100, CPU)

    def gradient(**fields: object) -> Tensor:
        config = PolicyConfig.model_validate({"model": "tiny", "old_log_probs": "recomputed", **fields})
        logits = policy.clone().requires_grad_()
        log_probs = logits.log_softmax(-1)[batch.targets]
        policy_loss(config, 4, replace(batch, old_log_probs=None), log_probs, None)[0].sum().backward()
        return logits.grad

    logits = policy.clone().requires_grad_()
    (-logits.softmax(-1) @ torch.tensor(advantages)).backward()
    bias = (gradient() - logits.grad).norm() / logits.grad.norm()
    assert bias > 0.1
    torch.testing.assert_close(gradient(behaviour_correction="truncate"), logits.grad)
    torch.testing.assert_close(gradient(behaviour_correction="mask"), logits.grad)
    # A cap that binds leaves some of the bias, and no more than there was.
    capped = gradient(behaviour_correction="truncate", behaviour_cap=1.1)
    assert 1e-3 < (capped - logits.grad).norm() / logits.grad.norm() < bias


def test_without_a_correction_the_loss_is_what_it_was_to_the_last_bit(tiny_model: str) -> None:
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, CPU)
    config = PolicyConfig(model="t")
    for old in (batch.behaviour_log_probs, None):
        log_probs = (batch.behaviour_log_probs - 0.1).requires_grad_()
        with_old = replace(batch, old_log_probs=old)
        per_token, values = policy_loss(config, denominator(config, batch), with_old, log_probs, None)
        ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
        surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(1.0 - 0.2, 1.0 + 0.28) * batch.advantages)
        expected = (-surrogate * (torch.ones(len(ratio)) / len(ratio))).sum()
        assert not [name for name in values if name.startswith("behaviour")]
        assert torch.equal(per_token.sum(), expected)
        assert torch.equal(*(torch.autograd.grad(loss, log_probs)[0] for loss in (per_token.sum(), expected)))


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_broken_log_prob_is_not_masked_away(tiny_model: str, correction: str) -> None:
    config = PolicyConfig(model="t", old_log_probs="recomputed", behaviour_correction=correction)
    (batch,) = micro_batches(make_rollouts(tiny_model, zero_group=False), 10_000, CPU)
    batch.behaviour_log_probs[2] = math.nan
    log_probs = torch.full((len(batch.targets),), -3.0, requires_grad=True)
    per_token, _ = policy_loss(config, denominator(config, batch), replace(batch, old_log_probs=None), log_probs, None)
    assert per_token.isfinite().logical_not().nonzero().tolist() == [[2]]


def test_the_kl_estimate_averages_to_the_kl() -> None:
    policy, reference = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1).double()
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * kl_estimate(policy, reference)).sum()) == pytest.approx(exact)
    assert math.isclose(float(kl_estimate(policy, policy).abs().max()), 0.0)
