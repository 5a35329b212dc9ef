"""The drafter as a whole: initial weights, vocabulary, loss, and that it learns."""

import dataclasses

import pytest
import torch

from drafters.acceptance import expected_acceptance_length
from drafters.base import Sampler, TargetWeights
from drafters.build import build_drafter
from drafters.config import Eagle3Config, ObjectiveConfig
from drafters.losses import Teacher, acceptances
from tests.drafters.conftest import TARGET, make_batch, make_drafter

CONFIG = Eagle3Config(type="eagle3", draft_vocab_size=20, aux_layers=(2, 4, 5))


def test_a_seed_fixes_the_weights_and_the_global_seed_stays():
    before = torch.get_rng_state()
    first, again, other = (build_drafter(CONFIG, TARGET, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.self_attn.q_proj.weight"], other["layers.0.self_attn.q_proj.weight"])
    assert all(tensor.isfinite().all() for tensor in first.values())


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
    assert drafter.t2d.nonzero().flatten().tolist() == tokens.tolist()
    torch.testing.assert_close(drafter.lm_head.weight.detach(), target_weights.head[tokens])


def test_the_whole_vocabulary_has_no_map(target_weights):
    drafter = make_drafter(draft_vocab_size=TARGET.vocab_size)
    assert {"d2t", "t2d"}.isdisjoint(drafter.state_dict())
    assert drafter.choose_vocabulary(torch.ones(40), target_weights) == 1.0
    assert drafter.draft_to_target.tolist() == list(range(40))


def test_serving_state_has_the_map_and_nothing_of_the_target():
    state = make_drafter().state_for_serving()
    assert "d2t" in state
    assert not [name for name in state if "embed_tokens" in name or name == "t2d"]


def test_nothing_is_accepted_behind_the_end_of_sequence(target_weights, sampler):
    batch = make_batch((4, 8, 0), (6, 8, 0))
    batch.token_ids[11] = TARGET.eos_token_ids[0]  # the first rollout's last token
    acceptance = make_drafter().loss(batch, target_weights, sampler, ObjectiveConfig()).acceptance
    predicted = acceptance.offset + 1 + torch.arange(3)[:, None]  # offset of the token that position k drafts
    beyond, generated = predicted > 7, (predicted >= 0) & (predicted <= 7)
    ended, cut = acceptance.rollout == 0, acceptance.rollout == 1
    assert (beyond & ended).any() and (beyond & cut).any()
    for table in (acceptance.probability, acceptance.drawn):
        assert (table[beyond & ended] == 0).all()
        assert table[beyond & cut].isnan().all()
        assert table[generated].isfinite().all()
    assert (acceptance.probability[generated] > 0).all()


def test_packing_changes_no_loss(target_weights, sampler):
    """Rollouts packed together score as the mean of the rollouts scored alone."""
    drafter, objective = make_drafter(), ObjectiveConfig()
    together = make_batch((4, 8, 0), (6, 8, 0))
    alone = []
    for document in (0, 1):
        rows = together.document_ids == document
        fields = {f.name: getattr(together, f.name) for f in dataclasses.fields(together)}
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
        alone.append(drafter.loss(dataclasses.replace(together, **part), target_weights, sampler, objective))
    packed = drafter.loss(together, target_weights, sampler, objective)
    assert packed.num_tokens == alone[0].num_tokens + alone[1].num_tokens
    torch.testing.assert_close(packed.per_position, (alone[0].per_position + alone[1].per_position) / 2)
    lengths = [expected_acceptance_length(parts, 3) for parts in ([packed.acceptance], [a.acceptance for a in alone])]
    assert lengths[0] == pytest.approx(lengths[1])


def test_a_batch_without_supervision_has_zero_loss_and_gradient(target_weights, sampler):
    drafter = make_drafter()
    result = drafter.loss(make_batch((5, 0, 0)), target_weights, sampler, ObjectiveConfig())
    result.loss.backward()
    assert result.loss == 0 and result.num_tokens == 0 and expected_acceptance_length([result.acceptance], 3) == 1.0
    assert drafter.lm_head.weight.grad.abs().max() == 0


def test_the_drafter_learns(sampler):
    """Rollouts that count upwards; features carry the token, the target is sure of the next one."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    target = TargetWeights(embedding, embedding, 0)
    batch = make_batch((4, 20, 0), (3, 20, 4), (6, 20, 0), dtype=torch.float32)
    tokens = (batch.positions + 7 * batch.document_ids) % 15 + 2
    states = embedding[tokens + 1].masked_fill(~batch.feature_mask[:, None], torch.nan)
    batch = dataclasses.replace(batch, token_ids=tokens, aux_hidden=states.repeat(1, 3), final_hidden=states)

    drafter = build_drafter(CONFIG, TARGET, seed=0)
    drafter.choose_vocabulary(torch.bincount(tokens, minlength=TARGET.vocab_size), target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    results = []
    for _ in range(100):
        results.append(drafter.loss(batch, target, sampler, ObjectiveConfig()))
        optimizer.zero_grad()
        results[-1].loss.backward()
        optimizer.step()
    assert results[-1].loss < 0.3 * results[0].loss
    assert expected_acceptance_length([results[0].acceptance], 3) < 2.0
    assert expected_acceptance_length([results[-1].acceptance], 3) > 3.5


def test_a_new_drafter_passes_the_highest_aux_state_through():
    drafter = build_drafter(CONFIG, TARGET, seed=0)
    aux_hidden = torch.randn(5, 3 * TARGET.hidden_size, generator=torch.Generator().manual_seed(0)) * 100
    highest = aux_hidden[:, -TARGET.hidden_size :]
    normed = highest / (highest.pow(2).mean(-1, keepdim=True) + TARGET.rms_norm_eps).sqrt()
    torch.testing.assert_close(drafter.fuse(aux_hidden), normed)
    classic = build_drafter(CONFIG.model_copy(update={"fc_norm": False}), TARGET, seed=0)
    assert "fc_norm.0.weight" not in classic.state_dict()
    torch.testing.assert_close(classic.fuse(aux_hidden), classic.fc(aux_hidden))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [5, 512])
def test_drafters_scored_together_score_as_alone(target_weights, monkeypatch, temperature, chunk_tokens):
    """Whatever their weights and vocabularies; and the target's distribution is computed once for all of them."""
    batch, objective = make_batch((4, 8, 0), (6, 8, 1)), ObjectiveConfig(chunk_tokens=chunk_tokens)
    sampler = Sampler(temperature, 0.9, 0, "probabilistic")
    drafters = [make_drafter(seed=0), make_drafter(seed=1), make_drafter(seed=2, draft_vocab_size=40)]
    drafters[1].choose_vocabulary(torch.arange(40.0), target_weights)
    alone = [drafter.loss(batch, target_weights, sampler, objective).acceptance for drafter in drafters]
    rows = []
    once = Teacher.processed_logits
    monkeypatch.setattr(
        Teacher, "processed_logits", lambda self, chunk: rows.extend(chunk.tolist()) or once(self, chunk)
    )
    together = acceptances(drafters, batch, target_weights, sampler, objective)
    assert len(rows) == len(set(rows)) > 10
    for ours, theirs in zip(together, alone, strict=True):
        for field in dataclasses.fields(ours):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not torch.equal(together[0].probability.nan_to_num(), together[1].probability.nan_to_num())


def test_drafters_of_different_depths_are_not_scored_together(target_weights, sampler):
    drafters = [make_drafter(), make_drafter(trained_depth=2)]
    with pytest.raises(ValueError, match=r"trained depths .* \[2, 3\]"):
        acceptances(drafters, make_batch((4, 8, 0)), target_weights, sampler, ObjectiveConfig())
