"""What only EAGLE-3 has: a vocabulary and a head of its own, and states of several target layers."""

import dataclasses

import torch

from drafters.base import ServingSpec
from drafters.build import build_drafter
from drafters.eagle3.model import Eagle3Drafter
from tests.drafters.conftest import EAGLE3, TARGET, make_drafter


def test_choosing_the_vocabulary_sets_map_and_head(target_weights):
    drafter = make_drafter()
    assert drafter.draft_to_target.tolist() == list(range(20))
    counts = torch.zeros(40)
    counts[25:40] = torch.arange(1, 16)
    counts[3] = 30
    share = drafter.choose_vocabulary(counts, target_weights)
    tokens = drafter.draft_to_target
    assert share == 1.0
    assert {2, 3, *range(25, 40)} <= set(tokens.tolist())  # 2 is the end of sequence
    assert drafter.d2t.tolist() == [token - i for i, token in enumerate(tokens.tolist())]
    assert drafter.saved_state()["t2d"].nonzero().flatten().tolist() == tokens.tolist()
    torch.testing.assert_close(drafter.lm_head.weight.detach(), target_weights.head[tokens])


def test_the_whole_vocabulary_has_no_map(target_weights):
    drafter = make_drafter(draft_vocab_size=TARGET.vocab_size)
    assert {"d2t", "t2d"}.isdisjoint(drafter.saved_state())
    assert drafter.choose_vocabulary(torch.ones(40), target_weights) == 1.0
    assert drafter.draft_to_target.tolist() == list(range(40))


def test_an_engine_is_told_the_layers_and_given_the_map():
    drafter = make_drafter()
    assert drafter.serving == ServingSpec("eagle3", aux_layers=(2, 4, 5))
    assert "d2t" in drafter.state_for_serving() and "t2d" not in drafter.state_for_serving()


def test_a_new_drafter_passes_the_highest_aux_state_through():
    drafter = build_drafter(EAGLE3.config, TARGET, seed=0)
    aux_hidden = torch.randn(5, 3 * TARGET.hidden_size, generator=torch.Generator().manual_seed(0)) * 100
    highest = aux_hidden[:, -TARGET.hidden_size :]
    normed = highest / (highest.pow(2).mean(-1, keepdim=True) + TARGET.rms_norm_eps).sqrt()
    torch.testing.assert_close(drafter.fuse(aux_hidden), normed)
    classic = Eagle3Drafter(dataclasses.replace(drafter.shape, fc_norm=False))
    assert "fc_norm.0.weight" not in classic.state_dict()
    torch.testing.assert_close(classic.fuse(aux_hidden), classic.fc(aux_hidden))
