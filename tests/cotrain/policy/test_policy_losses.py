import math

import pytest
import torch
from policy_cases import make_rollouts
from torch import Tensor

from cotrain.config.schema import PolicyConfig
from cotrain.policy import losses
from cotrain.policy.batching import MicroBatch, micro_batches
from cotrain.policy.losses import kl_estimate, policy_loss
from cotrain.records import Rollout, ScoredRollout, Versions

CPU = torch.device("cpu")


def all_tokens(rollouts: list[ScoredRollout]) -> MicroBatch:
    """The rollouts in one micro-batch."""
    [batch] = micro_batches(rollouts, 10_000, CPU)
    return batch


def noise(batch: MicroBatch, scale: float, seed: int) -> Tensor:
    return scale * torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(config: PolicyConfig, batch: MicroBatch, log_probs: Tensor) -> tuple[Tensor, list[float]]:
    """One scalar at a time, as the papers write it, and the weight of each token."""
    terms, weights = [], []
    for t in range(len(batch.targets)):
        old, behaviour = log_probs[t].item(), batch.behaviour_log_probs[t].item()
        weight = min(math.exp(max(-20.0, min(20.0, old - behaviour))), losses.MAX_WEIGHT)
        weights.append(weight if config.behaviour_correction else 1.0)
        ratio = torch.exp(log_probs[t] - (behaviour if config.old_log_probs == "rollout" else old))
        clipped = torch.clamp(ratio, 1 - losses.CLIP_LOW, 1 + losses.CLIP_HIGH)
        surrogate = torch.minimum(ratio * batch.advantages[t], clipped * batch.advantages[t])
        terms.append(-weights[-1] * surrogate)
    return sum(terms) / len(terms), weights


@pytest.mark.parametrize("correction", ["none", "recomputed", "truncate"])
def test_loss_and_gradient_equal_a_slow_loop(tiny_model: str, correction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound, value in (("CLIP_LOW", 0.05), ("CLIP_HIGH", 0.08), ("MAX_WEIGHT", 1.3)):
        monkeypatch.setattr(losses, bound, value)
    config = PolicyConfig(
        model="tiny",
        old_log_probs="rollout" if correction == "none" else "recomputed",
        behaviour_correction="truncate" if correction == "truncate" else None,
    )
    batch = all_tokens(make_rollouts(tiny_model, zero_group=False))
    current = batch.behaviour_log_probs + noise(batch, 0.3, seed=1)
    if correction == "truncate":
        current[3] = batch.behaviour_log_probs[3] + 30.0  # an engine and a learner that know nothing of each other

    fast_input = current.clone().requires_grad_()
    per_token, values = policy_loss(config, len(batch.targets), batch, fast_input)
    per_token.sum().backward()
    slow_input = current.clone().requires_grad_()
    loss, weights = slow_loss(config, batch, slow_input)
    loss.backward()

    torch.testing.assert_close(per_token.sum(), loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(fast_input.grad, slow_input.grad, rtol=1e-5, atol=1e-7)
    if correction == "none":
        ratio = (current - batch.behaviour_log_probs).exp()
        assert torch.equal(values["clip_fraction"], torch.where(batch.advantages > 0, ratio > 1.08, ratio < 0.95))
        assert values["clip_fraction"].any() and not values["clip_fraction"].all()
    if correction == "truncate":
        weight, ratio = values["behaviour_weight_mean"], values["behaviour_ratio_mean"]
        assert not weight.requires_grad
        torch.testing.assert_close(weight, torch.tensor(weights, dtype=torch.float64), rtol=1e-5, atol=0)
        assert torch.equal(values["behaviour_capped"], torch.tensor(weights) == 1.3)
        assert values["behaviour_capped"].any() and not values["behaviour_capped"].all()
        torch.testing.assert_close(ratio[3], torch.tensor(math.exp(20.0), dtype=torch.float64))


def test_with_recomputed_log_probs_the_ratio_is_one_and_still_has_a_gradient(tiny_model: str) -> None:
    batch = all_tokens(make_rollouts(tiny_model, zero_group=False))
    log_probs = (batch.behaviour_log_probs - 0.5).requires_grad_()
    config = PolicyConfig(model="t", old_log_probs="recomputed")
    per_token, values = policy_loss(config, len(batch.targets), batch, log_probs)
    per_token.sum().backward()
    assert (values["ratio_max"] == 1).all() and not [name for name in values if name.startswith("behaviour")]
    torch.testing.assert_close(log_probs.grad, -batch.advantages / len(batch.targets))


def test_a_correction_takes_away_the_bias_of_another_behaviour_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a vocabulary of three, as often as the engine draws it, so that the mean is the expectation."""
    policy = torch.tensor([0.2, 0.2, 0.6]).log()
    behaviour = [0.25, 0.25, 0.5]
    advantages = [1.0, -0.5, 0.3]
    drawn = [0, 1, 2, 2]
    rollouts = [
        ScoredRollout(
            Rollout("p", index, [0], [token], [math.log(behaviour[token])], "", "stop", Versions(0, 0), None),
            reward=0.0,
            advantage=advantages[token],
        )
        for index, token in enumerate(drawn)
    ]
    batch = all_tokens(rollouts)

    def gradient(**fields: object) -> Tensor:
        config = PolicyConfig.model_validate({"model": "tiny", "old_log_probs": "recomputed", **fields})
        logits = policy.clone().requires_grad_()
        log_probs = logits.log_softmax(-1)[batch.targets]
        policy_loss(config, 4, batch, log_probs)[0].sum().backward()
        return logits.grad

    logits = policy.clone().requires_grad_()
    (-logits.softmax(-1) @ torch.tensor(advantages)).backward()
    bias = (gradient() - logits.grad).norm() / logits.grad.norm()
    assert bias > 0.1
    torch.testing.assert_close(gradient(behaviour_correction="truncate"), logits.grad)
    # A cap that binds leaves some of the bias, and no more than there was.
    monkeypatch.setattr(losses, "MAX_WEIGHT", 1.1)
    capped = gradient(behaviour_correction="truncate")
    assert 1e-3 < (capped - logits.grad).norm() / logits.grad.norm() < bias


def test_a_broken_log_prob_shows_in_the_loss(tiny_model: str) -> None:
    config = PolicyConfig(model="t", old_log_probs="recomputed", behaviour_correction="truncate")
    batch = all_tokens(make_rollouts(tiny_model, zero_group=False))
    batch.behaviour_log_probs[2] = math.nan
    log_probs = torch.full((len(batch.targets),), -3.0, requires_grad=True)
    per_token, _ = policy_loss(config, len(batch.targets), batch, log_probs)
    assert per_token.isfinite().logical_not().nonzero().tolist() == [[2]]


def test_the_kl_estimate_averages_to_the_kl() -> None:
    policy, reference = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1).double()
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * kl_estimate(policy, reference)).sum()) == pytest.approx(exact)
    assert math.isclose(float(kl_estimate(policy, policy).abs().max()), 0.0)
