"""The unroll whatever it unrolls. Each drafter's own folder compares it with decoding with a KV cache, or for the draft
model, which is transformers' own and needs no unroll, with that model on one rollout after another."""

import dataclasses

import pytest
import torch

from drafters import unroll as unroll_module
from drafters.alignment import align
from tests.drafters.conftest import EAGLE3, MTP_KINDS, TARGET, kind_name, make_batch

unrolled_kinds = pytest.mark.parametrize("kind", (EAGLE3, *MTP_KINDS), ids=kind_name)


def unrolled(drafter, batch, target):
    alignment = align(batch, drafter.shape.trained_depth)
    return alignment, drafter.drafts(batch, alignment, target)[0]


def unrolled_parameters(drafter):
    return [parameter for name, parameter in drafter.named_parameters() if name != "lm_head.weight"]


@unrolled_kinds
@pytest.mark.parametrize(
    "bounds",
    [
        {"attention.MAX_SCORES": 300},
        {"unroll.MAX_STARTS": 7},
        {"attention.MAX_SCORES": 300, "unroll.MAX_STARTS": 7},
        {"attention.MAX_SCORES": 300, "unroll.MAX_STARTS": 7, "attention.KEPT_SCORES": 0, "unroll.KEPT_STARTS": 0},
    ],
    ids=str,
)
def test_chunks_change_nothing(kind, bounds, target_weights, monkeypatch):
    batch, drafter = make_batch((5, 30, 0), (3, 8, 2)), kind.make()

    def outputs_and_gradients():
        outputs = unrolled(drafter, batch, target_weights)[1]
        total = sum(output.square().sum() for output in outputs)
        return outputs, torch.autograd.grad(total, unrolled_parameters(drafter))

    whole = outputs_and_gradients()
    parts = []
    attend = unroll_module.attend
    monkeypatch.setattr(
        unroll_module, "attend", lambda *arguments: parts.append(len(arguments[0])) or attend(*arguments)
    )
    for name, value in bounds.items():
        monkeypatch.setattr(f"drafters.{name}", value)
    torch.testing.assert_close(outputs_and_gradients(), whole)
    assert max(parts) <= bounds.get("unroll.MAX_STARTS", max(parts))


@unrolled_kinds
def test_gradients_equal_finite_differences(kind, target_weights):
    batch, drafter = make_batch((2, 4, 0)), kind.make()

    def total() -> torch.Tensor:
        return sum(output.square().sum() for output in unrolled(drafter, batch, target_weights)[1])

    generator = torch.Generator().manual_seed(0)
    parameters = unrolled_parameters(drafter)
    for parameter, gradient in zip(parameters, torch.autograd.grad(total(), parameters), strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            before = parameter.clone()
            parameter.copy_(before + 1e-6 * direction)
            above = total()
            parameter.copy_(before - 1e-6 * direction)
            below = total()
            parameter.copy_(before)
        torch.testing.assert_close((above - below) / 2e-6, (gradient * direction).sum(), rtol=1e-5, atol=1e-6)


def test_a_hole_in_one_rollout_changes_nothing_in_another(kind, target_weights):
    drafter, whole = kind.make(), make_batch((6, 8, 0), (4, 9, 0))
    holed = dataclasses.replace(
        whole,
        feature_mask=whole.feature_mask.clone(),
        aux_hidden=whole.aux_hidden.clone(),
        final_hidden=whole.final_hidden.clone(),
    )
    holed.feature_mask[:4] = False
    holed.aux_hidden[:4] = torch.nan
    holed.final_hidden[:4] = torch.nan
    results = []
    for batch in (whole, holed):
        alignment, outputs = unrolled(drafter, batch, target_weights)
        second = batch.document_ids[alignment.start_rows] == 1
        results.append([output[second] for output in outputs])
        assert all(output.isfinite().all() for output in outputs)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_no_start_is_an_empty_result(kind, target_weights):
    drafter = kind.make()
    _, outputs = unrolled(drafter, make_batch((4, 0, 0)), target_weights)
    width = TARGET.hidden_size + getattr(drafter.shape, "markov_rank", 0)
    assert [output.shape for output in outputs] == [(0, width)] * 3
