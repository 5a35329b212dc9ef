"""DFlash as an engine runs it: keys and values of the context from hidden states alone, then one pass over a block."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.alignment import DraftBatch, align
from drafters.block.model import DFlashDrafter
from drafters.build import build_drafter, load_drafter
from drafters.losses import acceptances
from tests.drafters.conftest import DFLASH, TARGET, edit_config, make_batch
from tests.drafters.decoding import DOCUMENTS, CachedDecoder


class BlockDecoder(CachedDecoder):
    """Rows one by one, from the weights that are served."""

    head_dim = rotary_dim = TARGET.head_dim

    def __init__(self, drafter: DFlashDrafter) -> None:
        self.weights, self.shape = drafter.state_for_serving(), drafter.shape

    def first(self, batch: DraftBatch, row: int) -> Tensor:
        return self.norm(self.linear(batch.aux_hidden[row], "fc"), "hidden_norm")

    def step(self, *_: object) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def heads(self, x: Tensor, kind: str, layer: str) -> Tensor:
        return self.linear(x, f"{layer}.self_attn.{kind}_proj").view(-1, self.head_dim)

    def key_and_value(self, x: Tensor, position: int, layer: str) -> tuple[Tensor, Tensor]:
        key = self.norm(self.heads(x, "k", layer), f"{layer}.self_attn.k_norm")
        return self.rotate(key, position), self.heads(x, "v", layer)

    def block(self, context: list[tuple[Tensor, int]], rows: Tensor) -> Tensor:
        """The state [B, H] that the head reads, from the context's states with their positions and the embeddings [B, H]."""
        first = context[-1][1] + 1
        for number in range(self.shape.sizes.num_layers):
            layer = f"layers.{number}"
            cache = [self.key_and_value(state, position, layer) for state, position in context]
            normed = self.norm(rows, f"{layer}.input_layernorm")
            own = [self.key_and_value(x, first + i, layer) for i, x in enumerate(normed)]
            outputs = []
            for i, x in enumerate(normed):
                query = self.rotate(self.norm(self.heads(x, "q", layer), f"{layer}.self_attn.q_norm"), first + i)
                seen = own[: i + 1] if self.shape.causal else own
                hidden = rows[i] + self.linear(self.attend(query, cache + seen), f"{layer}.self_attn.o_proj")
                normed_output = self.norm(hidden, f"{layer}.post_attention_layernorm")
                outputs.append(hidden + self.mlp(normed_output, f"{layer}.mlp"))
            rows = torch.stack(outputs)
        return self.norm(rows, "norm")


def made(causal: bool = True, **changes) -> DFlashDrafter:
    drafter = DFLASH.make(trained_depth=4, causal=causal, **changes)
    drafter.spread.copy_(torch.linspace(0.5, 3, len(drafter.spread)))
    return drafter


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_a_pass_over_all_blocks_equals_blocks_one_by_one(documents, num_layers, causal, target_weights):
    drafter, batch = made(causal, num_layers=num_layers), make_batch(*documents)
    decoder, alignment = BlockDecoder(drafter), align(batch, 4)
    outputs, _ = drafter.drafts(batch, alignment, target_weights)
    masks = target_weights.embedding[TARGET.unused_token_id].expand(4, -1)
    for start, row in enumerate(alignment.start_rows.tolist()):
        mine = (batch.document_ids == batch.document_ids[row]) & batch.feature_mask
        context = [
            (decoder.first(batch, r), int(batch.positions[r])) for r in mine.nonzero().flatten().tolist() if r <= row
        ]
        newest = target_weights.embedding[batch.token_ids[row + 1]]
        expected = decoder.block(context, torch.cat([newest[None], masks]))[1:]
        torch.testing.assert_close(torch.stack([o[start] for o in outputs]), expected, rtol=1e-6, atol=1e-6)
    assert len(alignment.start_rows) > 4


def test_a_causal_block_proposes_the_same_whatever_its_length(target_weights):
    batch = make_batch((3, 9, 0), (4, 8, 0))
    for causal in (True, False):
        drafter = made(causal)
        long, short = align(batch, 4), align(batch, 1)
        same = torch.isin(long.start_rows, short.start_rows)
        first = [drafter.drafts(batch, alignment, target_weights)[0][0] for alignment in (long, short)]
        assert torch.allclose(first[0][same], first[1]) == causal


def test_training_starts_with_columns_of_one_size(target_weights):
    batch = make_batch((3, 9, 0), (4, 8, 0))
    batch.aux_hidden[:, 5] *= 1000
    alignment = align(batch, 4)
    new, loaded = made(), made()
    before = loaded.drafts(batch, alignment, target_weights)[0]
    served = loaded.state_for_serving()
    for drafter in (new, loaded):
        drafter.start_training(batch, target_weights, is_new=drafter is new)
        scaled = batch.aux_hidden[batch.feature_mask] / drafter.spread
        torch.testing.assert_close(scaled.square().mean(0), torch.ones_like(scaled[0]))
    after = loaded.drafts(batch, alignment, target_weights)[0]
    torch.testing.assert_close(torch.stack(after), torch.stack(before))  # a loaded drafter is the same
    torch.testing.assert_close(loaded.state_for_serving()["fc.weight"], served["fc.weight"])


def test_a_new_one_begins_with_what_the_newest_row_says_of_the_next(target_weights):
    batch = make_batch(*[(3, 40, 0)] * 4)
    generator = torch.Generator().manual_seed(5)
    batch.aux_hidden.add_(1)  # as in a language model, states have a mean
    next_of = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    batch.final_hidden[1:] = 4 * batch.aux_hidden[:-1, -16:].nan_to_num() @ next_of.T
    alignment, rows = align(batch, 4), batch.feature_mask
    wanted = batch.final_hidden[alignment.start_rows + 1]

    def likeness(drafter: DFlashDrafter) -> float:
        states, _ = drafter.drafts(batch, alignment, target_weights)
        return torch.cosine_similarity(states[0] - states[0].mean(0), wanted - wanted.mean(0)).mean().item()

    sizes = dataclasses.replace(TARGET, head_dim=64)  # a head of a few dimensions can hardly tell positions apart
    drafter = build_drafter(DFLASH.configured(trained_depth=4), sizes, 0).double()
    before = likeness(drafter)
    drafter.start_training(batch, target_weights, is_new=True)
    predicted = drafter.fc(batch.aux_hidden / drafter.spread)[:-1][rows[:-1] & rows[1:]]
    true = batch.final_hidden[1:][rows[:-1] & rows[1:]]
    assert torch.cosine_similarity(predicted, true).mean() > 0.85
    assert likeness(drafter) > max(0.6, before + 0.5)
    torch.testing.assert_close(drafter.norm.weight, drafter.norm.weight[:1].expand(16))
    assert drafter.norm.weight[0].item() == pytest.approx(float(batch.final_hidden[rows].square().mean().sqrt()))


def test_the_mask_token_is_never_proposed(target_weights):
    drafter = DFLASH.make()
    counts = torch.zeros(TARGET.vocab_size)
    counts[TARGET.unused_token_id] = 100
    drafter.choose_vocabulary(counts, target_weights)
    assert TARGET.unused_token_id not in drafter.draft_to_target


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ({"unused_token_id": None}, {}, "mask_token_id: every token of the policy's vocabulary may occur"),
        ({}, {"mask_token_id": 40}, "mask_token_id: 40 is no token below 40"),
        ({}, {"mask_token_id": 2}, "mask_token_id: 2 is no token"),
        ({}, {"draft_vocab_size": 41}, "draft_vocab_size: 41 is above"),
        ({}, {"markov_rank": 4}, "markov_rank: DFlash has no Markov head"),
    ],
)
def test_settings_that_cannot_be_are_refused(target, config, message):
    with pytest.raises(ValueError, match=message):
        build_drafter(DFLASH.configured(**config), dataclasses.replace(TARGET, **target), 0)


def published(folder, **changes):
    """A checkpoint as its makers store it: without a head and a map, not causal, with ids of layers of their own."""
    made(causal=False).float().save(folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in ("lm_head.weight", "d2t")}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own = {name: value for name, value in config["dflash_config"].items() if name != "causal"}
    edit_config(folder, draft_vocab_size=None, dflash_config=own | changes.pop("dflash_config", {}), **changes)


def test_a_published_checkpoint_is_read_as_its_makers_mean_it(tmp_path, target_weights):
    published(tmp_path)
    drafter = load_drafter(tmp_path, TARGET)
    assert not drafter.shape.causal and not drafter.shape.has_head
    assert drafter.shape.aux_layers == (2, 4, 5) and drafter.shape.trained_depth == 4
    batch = make_batch((3, 9, 0), dtype=torch.float32)
    _, head = drafter.drafts(batch, align(batch, 4), target_weights)
    assert head is target_weights.head and len(drafter.draft_to_target) == TARGET.vocab_size
    drafter.save(tmp_path / "again", torch.float32)
    assert load_drafter(tmp_path / "again", TARGET).shape == drafter.shape


FIELDS_OF_MAKERS = {
    "as most": {"block_size": 16, "rope_theta": 1000000, "rope_scaling": None, "use_sliding_window": False},
    "eight layers, tied": {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 8, "max_window_layers": 8},
    "mask is the end of text": {"dflash_config": {"mask_token_id": 2}, "eos_token_id": 2},
    "target layers that are not evenly spaced": {"dflash_config": {"target_layer_ids": [1, 3, 6]}},
    "yarn": {
        "rope_parameters": {
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
            "rope_type": "yarn",
        }
    },
}


@pytest.mark.parametrize("fields", FIELDS_OF_MAKERS.values(), ids=FIELDS_OF_MAKERS)
def test_fields_that_makers_of_checkpoints_write_are_read(fields, tmp_path):
    """Those of the configurations in SpecForge's folder; all of its DFlash drafters but that with sliding windows can be read."""
    common = {
        "num_target_layers": 8,
        "attention_dropout": 0.0,
        "use_cache": True,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    }
    published(tmp_path, **common | fields)
    shape = load_drafter(tmp_path, TARGET).shape
    assert shape.trained_depth == fields.get("block_size", 5) - 1
    assert shape.mask_token_id == fields.get("dflash_config", {}).get("mask_token_id", 39)
    ids = fields.get("dflash_config", {}).get("target_layer_ids", [1, 3, 4])
    assert shape.aux_layers == tuple(layer + 1 for layer in ids)
    assert shape.sizes.rope_parameters["rope_type"] == fields.get("rope_parameters", {}).get("rope_type", "default")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"use_swa": True}}, "use_swa = True"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
        ({"dflash_config": {"mask_token_id": None}}, "no mask_token_id"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "it has layers with sliding attention"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"hidden_size": 32}, "hidden_size is 32"),
    ],
)
def test_variants_that_are_computed_otherwise_are_refused(changes, message, tmp_path):
    published(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, TARGET)


def test_acceptance_is_that_of_the_served_length_where_drafts_follow_from_it(target_weights, sampling):
    batch = make_batch((3, 9, 0), (4, 8, 0))
    for causal in (True, False):
        drafter = made(causal)
        of_four = acceptances([drafter], batch, target_weights, sampling)[0]
        of_two = acceptances([drafter], batch, target_weights, sampling, served=2)[0]
        assert drafter.drafts_follow_length != causal
        assert len(of_four.probability) == 4 and len(of_two.probability) == (4 if causal else 2)
        if not causal:
            alignment = align(batch, 2)
            states, head = drafter.drafts(batch, alignment, target_weights)
            start = int(of_two.probability[0].isfinite().nonzero()[0])
            q = (states[0][start] @ head.T).softmax(-1)
            p = (batch.final_hidden[alignment.start_rows[start] + 1] @ target_weights.head.T).softmax(-1)
            expected = torch.minimum(p[drafter.draft_to_target], q).sum()
            torch.testing.assert_close(of_two.probability[0, start].to(expected), expected, rtol=1e-5, atol=1e-5)
