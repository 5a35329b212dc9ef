"""DSpark: DFlash's block, a bias of the token before, and an estimate of what is accepted."""

import json

import pytest
import torch
from torch.nn import functional as F

from drafters.alignment import align
from drafters.build import load_drafter
from drafters.losses import acceptances, drafter_loss
from tests.drafters.block.test_block import BlockDecoder
from tests.drafters.conftest import DSPARK, TARGET, edit_config, make_batch

BATCH = ((3, 9, 0), (4, 8, 0))


@pytest.mark.parametrize("from_anchor", [False, True])
def test_a_draft_token_has_the_bias_of_the_token_before(from_anchor, target_weights):
    drafter, batch = DSPARK.make(from_anchor=from_anchor), make_batch(*BATCH)
    decoder, alignment = BlockDecoder(drafter), align(batch, 3)
    states, head = drafter.drafts(batch, alignment, target_weights)
    weights = drafter.state_for_serving()
    w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    masks = target_weights.embedding[TARGET.unused_token_id].expand(2 if from_anchor else 3, -1)
    for start, row in enumerate(alignment.start_rows.tolist()):
        mine = (batch.document_ids == batch.document_ids[row]) & batch.feature_mask
        rows = [r for r in mine.nonzero().flatten().tolist() if r <= row]
        context = [(decoder.first(batch, r), int(batch.positions[r])) for r in rows]
        block = decoder.block(context, torch.cat([target_weights.embedding[batch.token_ids[row + 1]][None], masks]))
        for position, hidden in enumerate(block[-3:]):
            if alignment.supervised[position, start]:
                before = batch.token_ids[row + 1 + position]
                expected = weights["lm_head.weight"] @ hidden + w2 @ w1[before]
                torch.testing.assert_close(head @ states[position][start], expected)


def test_confidence_learns_acceptance_and_changes_no_draft(target_weights, sampling):
    drafter, batch = DSPARK.make(), make_batch(*BATCH)
    without = DSPARK.make()
    without.own_loss = lambda states, accepted: None
    losses = [drafter_loss(one, batch, target_weights, sampling)[0] for one in (drafter, without)]
    for loss in losses:
        loss.backward()
    others = dict(without.named_parameters())
    for name, parameter in drafter.named_parameters():
        if name.startswith("confidence_head"):
            assert parameter.grad.abs().max() > 0 and others[name].grad is None
        else:
            assert torch.equal(parameter.grad, others[name].grad)
    states, _ = drafter.drafts(batch, align(batch, 3), target_weights)
    proj, entropies = drafter.confidence_head["proj"], []
    accepted = acceptances([drafter], batch, target_weights, sampling)[0].probability
    known = align(batch, 3).supervised
    for position, start in known.nonzero().tolist():
        estimate = (proj.weight[0] @ states[position][start] + proj.bias[0]).sigmoid()
        entropies.append(F.binary_cross_entropy(estimate, accepted[position, start].to(estimate.dtype)))
    torch.testing.assert_close(losses[0] - losses[1], torch.stack(entropies).mean(), rtol=1e-4, atol=1e-5)


def published(folder, **changes):
    DSPARK.make(from_anchor=True).float().save(folder, torch.float32)
    edit_config(folder, **changes)


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_fields_of_makers_are_read(architecture, tmp_path):
    """A public checkpoint has layers and mask beside the other fields, and says nothing of its rows, which start at the anchor."""
    published(tmp_path, architectures=[architecture])
    config = json.loads((tmp_path / "config.json").read_text())
    own = config.pop("dflash_config")
    fields = {"dflash_config": None, "sample_from_anchor": None, "is_causal": False, "block_size": 3}
    edit_config(tmp_path, target_layer_ids=own["target_layer_ids"], dspark_noise_token_id=39, **fields)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n != "sample_from_anchor"}))
    shape = load_drafter(tmp_path, TARGET).shape
    assert shape.from_anchor and not shape.causal
    assert (shape.aux_layers, shape.mask_token_id, shape.trained_depth) == ((2, 4, 5), 39, 3)


def test_a_confidence_head_that_is_off_is_left_out(tmp_path):
    published(tmp_path, enable_confidence_head=False)
    assert load_drafter(tmp_path, TARGET).shape.confidence == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "mixed"}, "markov_head_type = 'mixed'"),
        ({"markov_rank": None}, "no markov_rank"),
        ({"markov_rank": None, "dflash_config": {"mask_token_id": 39, "markov_rank": 5}}, "move it, and what else"),
        ({"dspark_draft_topk": 32}, "dspark_draft_topk = 32"),
        ({"markov_rank": 6}, "size mismatch for markov_head.markov_w1.weight"),
    ],
)
def test_variants_that_are_computed_otherwise_are_refused(changes, message, tmp_path):
    published(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, TARGET)
