"""What only MTP has: it begins as the target's own state, and borrows the target's head."""

import copy
import dataclasses

import pytest
import torch

from drafters.alignment import align
from drafters.base import ServingSpec
from drafters.build import build_drafter
from drafters.losses import drafter_loss
from tests.drafters.conftest import GLM, MIMO, MTP_KINDS, QWEN3_NEXT, TARGET, kind_name, make_batch


@pytest.fixture(params=MTP_KINDS, ids=kind_name)
def kind(request):
    return request.param


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [(MIMO, (("num_nextn_predict_layers", 1),)), (QWEN3_NEXT, ()), (GLM, (("num_nextn_predict_layers", 1),))],
    ids=["mimo", "qwen3_next", "glm4_moe"],
)
def test_an_engine_is_told_what_the_target_must_say(kind, overrides):
    assert kind.make().serving == ServingSpec("mtp", aux_layers=(), target_overrides=overrides)


def test_a_new_head_passes_the_targets_hidden_state_through(kind):
    head = build_drafter(kind.config, kind.target, seed=0).head
    generator = torch.Generator().manual_seed(0)
    embeddings, hidden = (torch.randn(5, TARGET.hidden_size, generator=generator) * 100 for _ in range(2))
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + TARGET.rms_norm_eps).sqrt()
    torch.testing.assert_close(head.join(embeddings, hidden, torch.arange(5)), normed)
    gains = [parameter for name, parameter in head.named_parameters() if name.endswith("norm.weight")]
    assert len(gains) >= 5 and all((gain == float(kind in (MIMO, GLM))).all() for gain in gains)


def test_the_vocabulary_is_the_targets(kind, target_weights):
    drafter, batch = kind.make(), make_batch((3, 8, 0))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert drafter.choose_vocabulary(torch.arange(TARGET.vocab_size), target_weights) == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert drafter.draft_to_target.tolist() == list(range(TARGET.vocab_size))
    _, head = drafter.drafts(batch, align(batch, 3), target_weights)
    assert torch.equal(head, target_weights.head)


def test_the_borrowed_head_is_as_it_is_now_and_gets_no_gradient_buffer(kind, target_weights, sampling, monkeypatch):
    drafter, batch = kind.make(), make_batch((3, 8, 0))
    newer = dataclasses.replace(target_weights, head=(2 * target_weights.head).requires_grad_())
    drafter.drafts(batch, align(batch, 3), target_weights)
    hidden, head = drafter.drafts(batch, align(batch, 3), newer)
    assert torch.equal(head, 2 * target_weights.head)
    assert not head.requires_grad and all(state.requires_grad for state in hidden)
    sizes = []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda tensor: sizes.append(tensor.shape) or zeros_like(tensor))
    drafter_loss(drafter, batch, newer, sampling)
    assert sizes.count(hidden[0].shape) == 3 and target_weights.head.shape not in sizes


def test_no_states_of_other_layers_are_needed(kind, target_weights, sampling):
    drafter, batch = kind.make(), make_batch((3, 8, 0), (4, 6, 2))
    narrow = dataclasses.replace(batch, aux_hidden=batch.aux_hidden[:, :0])
    whole, alone = (drafter_loss(drafter, b, target_weights, sampling)[0] for b in (batch, narrow))
    assert torch.equal(whole, alone) and alone > 0


def test_all_draft_positions_go_through_one_layer(kind, target_weights):
    """The number of parameters does not depend on the depth."""
    shallow, deep = (kind.make(trained_depth=depth) for depth in (1, 5))
    assert shallow.state_dict().keys() == deep.state_dict().keys()
    batch = make_batch((1, 8, 0))
    alignments = [align(batch, depth) for depth in (1, 5)]
    assert torch.equal(alignments[0].start_rows, alignments[1].start_rows)
    first, all_five = (
        drafter.drafts(batch, alignment, target_weights)[0]
        for drafter, alignment in zip((shallow, deep), alignments, strict=True)
    )
    assert len(all_five) == 5
    torch.testing.assert_close(first[0], all_five[0])


def test_a_copy_shares_nothing_with_its_original(kind):
    """torch does not know the head as a module: its parts are registered under the checkpoint's names."""
    drafter = kind.make()
    copied = copy.deepcopy(drafter)
    own = {id(parameter) for parameter in copied.parameters()}
    assert own == {id(parameter) for parameter in copied.head.parameters()}
    assert not own & {id(parameter) for parameter in drafter.parameters()}
