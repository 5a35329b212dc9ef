from dataclasses import replace

import pytest
import torch

import drafters.losses


@pytest.mark.parametrize("layers", [(2, 4, 5), ()])
def test_mixed_precision_gives_the_loss_and_gradient_of_float32_but_for_rounding(
    new_trainer, target, monkeypatch, layers
):
    """EAGLE-3 and MTP, as a GPU computes them, on a CPU. bfloat16 keeps 8 bits: a product is off by up to 0.4 %."""
    model = {"type": "eagle3", "draft_vocab_size": 96, "aux_layers": layers} if layers else {"type": "mtp"}
    records = target.rollouts(8, 2, seed=1, policy_version=0)
    records = [replace(r, aux_layers=layers, aux_hidden=r.aux_hidden[:, : 64 * len(layers)]) for r in records]
    losses, rates, gradients = [], [], []
    compared, compare = [], drafters.losses.compare

    def compare_outside_autocast(*arguments):
        compared.append(torch.is_autocast_enabled("cpu"))
        return compare(*arguments)

    monkeypatch.setattr("drafters.losses.compare", compare_outside_autocast)
    for devices in ((), ("cpu",)):
        monkeypatch.setattr("cotrain.trainer.trainer.MIXED_PRECISION", devices)
        trainer = new_trainer(model=model)
        scores, _ = trainer.take_in(records, 0, [0])
        losses.append(trainer.train(1, 1)["drafter/loss"])
        rates.append(scores.serving[-1].rates())
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.drafter.parameters()]))
        assert {p.dtype for p in trainer.drafter.parameters()} == {torch.float32} == {gradients[-1].dtype}
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and rates[1] == pytest.approx(rates[0], abs=5e-3)
    difference = gradients[1] - gradients[0]
    assert 0 < difference.norm() < 0.03 * gradients[0].norm(), "it is another computation, with the same result"
    assert compared and not any(compared), "probabilities and losses are float32"
