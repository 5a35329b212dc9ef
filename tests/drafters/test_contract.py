"""What every drafter promises: weights, checkpoint folders, losses, and what it leaves alone."""

import dataclasses
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafters.alignment import align
from drafters.base import LARGEST_WEIGHT, SamplingParams, TargetWeights
from drafters.build import build_drafter, load_drafter, shape_problems
from drafters.losses import Teacher, acceptances, drafter_loss
from tests.drafters.conftest import (
    EAGLE3,
    MIMO,
    TARGET,
    Kind,
    acceptance_length,
    assert_same_state,
    edit_config,
    make_batch,
    make_drafter,
    unnoticed,
)


@pytest.fixture
def drafter(kind: Kind, target_weights):
    drafter = kind.make().float()
    drafter.choose_vocabulary(torch.arange(TARGET.vocab_size), target_weights)
    return drafter


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save(tmp_path / "drafter", torch.float32)
    return tmp_path / "drafter"


def test_a_seed_fixes_the_weights_and_the_global_seed_stays(kind):
    assert shape_problems(kind.config, kind.target) == []
    before = torch.get_rng_state()
    first, again, other = (build_drafter(kind.config, kind.target, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_state(again, first)
    projection = next(name for name in first.state_dict() if name.endswith("self_attn.q_proj.weight"))
    assert not torch.equal(first.state_dict()[projection], other.state_dict()[projection])
    assert all(tensor.isfinite().all() for tensor in first.state_dict().values())
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_configured", [True, False])
def test_roundtrip(kind, dtype, as_configured, tmp_path):
    config = kind.config if as_configured else kind.configured(**dict(kind.other))
    drafter = kind.make(**config.model_dump()).float()
    drafter.save(tmp_path, dtype)
    loaded = load_drafter(tmp_path, kind.target, config=config)
    assert loaded.serving == drafter.serving
    assert loaded.shape.trained_depth == config.trained_depth
    assert loaded.to_config(loaded.shape) == drafter.to_config(drafter.shape)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert_same_state(loaded, drafter.to(dtype).float())
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_others_may_read_the_files_as_far_as_the_umask_says(drafter, tmp_path, umask):
    before = os.umask(umask)
    try:
        drafter.save(tmp_path / "drafter", torch.float32)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "drafter").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), oct(0o666 & ~umask))


def test_loading_into_a_drafter(kind, drafter, folder):
    other = kind.make(seed=9)
    before = dict(other.named_parameters())
    other.load_tensors(load_drafter(folder, kind.target).state_dict(), folder)
    assert all(parameter is before[name] for name, parameter in other.named_parameters())  # an optimizer holds them
    assert_same_state(other, drafter.double())


def test_what_is_served_is_what_is_saved(kind, drafter, folder, target_weights):
    served, saved = drafter.state_for_serving(), load_file(folder / "model.safetensors")
    assert saved.keys() - served.keys() <= {"t2d"} and served.keys() <= saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in served.items())
    matrices = [name for name, tensor in saved.items() if tensor.shape == target_weights.head.shape]
    assert bool(matrices) == any("embed_tokens" in name for name in saved) == kind.has_own_matrices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, r"hidden.size is 16, this one's is 32"),
        ({"vocab_size": 41}, r"vocab\w* is 40, this one's is 41"),
    ],
)
def test_a_drafter_for_another_target_is_refused(kind, folder, change, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, dataclasses.replace(kind.target, **change))


def test_a_drafter_of_another_type_is_refused(kind, folder):
    wanted = EAGLE3 if kind.config.type == "mtp" else MIMO
    message = f'of type "{kind.config.type}".*, but drafter.model.type is "{wanted.config.type}"'
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, kind.target, config=wanted.config)
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ValueError, match="holds GPT2LMHeadModel, not a drafter"):
        load_drafter(folder, kind.target)


def test_other_settings_than_the_checkpoints_are_refused(kind, folder):
    for name, value in kind.other:
        found = re.escape(f"drafter.model.{name} is {value}, the checkpoint has {getattr(kind.config, name)}")
        with pytest.raises(ValueError, match=f"was made with other settings.*{found}$"):
            load_drafter(folder, kind.target, config=kind.configured(**{name: value}))


def test_a_drafter_keeps_its_own_position_limit_and_is_refused_where_it_is_too_short(kind, folder, tmp_path):
    edit_config(folder, max_position_embeddings=128)
    drafter = load_drafter(folder, kind.target, num_positions=128)
    assert drafter.shape.sizes.max_position_embeddings == 128 < kind.target.max_position_embeddings
    drafter.save(tmp_path / "again", torch.float32)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["max_position_embeddings"] == 128
    with pytest.raises(ValueError, match=r"has 128 positions .* but 129 are needed"):
        load_drafter(folder, kind.target, num_positions=129)


class Killed(BaseException):
    """What a process that is killed raises nowhere: no handler of ours may mend the folder."""


@pytest.mark.parametrize("in_use", [False, True], ids=["new folder", "folder in use"])
def test_a_kill_at_any_moment_leaves_a_whole_drafter_or_none(kind, drafter, tmp_path, monkeypatch, in_use):
    folder, moments = tmp_path / "v1", 0
    newer = kind.make(seed=7, trained_depth=5).float()
    for moment in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if in_use:
            drafter.save(folder, torch.float32)
        if not kill_while_saving(newer, folder, moment, monkeypatch):
            break
        moments += 1
        try:
            found = load_drafter(folder, kind.target)
        except ValueError as error:
            assert "config.json does not exist" in str(error)
        else:
            whole = newer if found.shape.trained_depth == newer.shape.trained_depth else drafter
            assert_same_state(found, whole)
            assert found.shape.trained_depth == whole.shape.trained_depth
    assert moments >= 6
    assert_same_state(load_drafter(folder, kind.target), newer)


def kill_while_saving(drafter, folder, moment, monkeypatch):
    """Save, and die before the moment-th call that touches the disk; False when there are fewer."""
    calls = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("drafters.base.save_file", "drafters.base.os.replace", "drafters.base.os.fsync"):
            module, _, attribute = name.rpartition(".")
            patch.setattr(
                name, dying(getattr(importlib.import_module("os" if module.endswith("os") else module), attribute))
            )
        patch.setattr("drafters.base.Path.unlink", dying(Path.unlink))
        try:
            drafter.save(folder, torch.float32)
        except Killed:
            return True
    return False


def test_a_full_disk_leaves_the_drafter_that_was_there(kind, drafter, folder, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("drafters.base.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        kind.make(seed=7).save(folder, torch.float32)
    assert_same_state(load_drafter(folder, kind.target), drafter)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("damage", ["missing", "unexpected", "of another shape"])
def test_tensors_that_do_not_fit_are_refused(kind, folder, damage):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    if damage == "missing":
        message = f'Missing key.s. in state_dict: "{name}"'
        del tensors[name]
    elif damage == "unexpected":
        message = 'Unexpected key.s. in state_dict: "norm.bias"'
        tensors["norm.bias"] = torch.zeros(16)
    else:
        message = f"size mismatch for {name}: .*17.*{len(tensors[name])}"
        tensors[name] = torch.zeros(17)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"(?s)does not fit this drafter: .*{message}"):
        load_drafter(folder, kind.target)


@pytest.mark.parametrize("size", [0, 4, 200, -8])
def test_a_truncated_file_is_refused(kind, folder, size):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        load_drafter(folder, kind.target)


def test_missing_and_broken_files_are_refused(kind, folder, tmp_path):
    with pytest.raises(ValueError, match=re.escape("nowhere/config.json does not exist")):
        load_drafter(tmp_path / "nowhere", kind.target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape("model.safetensors does not exist")):
        load_drafter(folder, kind.target)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="is not JSON"):
        load_drafter(folder, kind.target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_found_in_every_parameter(kind, value, tmp_path):
    drafter = kind.make().float()
    assert drafter.overflowing() == []
    assert unnoticed(drafter, value) == []
    next(drafter.parameters()).data.fill_(value)
    drafter.save(tmp_path, torch.float32)
    with pytest.raises(ValueError, match="weights that no engine can serve"):
        load_drafter(tmp_path, kind.target)


def test_finite_weights_that_overflow_are_found(kind):
    drafter = kind.make().float()
    assert unnoticed(drafter, 3e38) == unnoticed(drafter, -2 * LARGEST_WEIGHT) == []
    assert len(unnoticed(drafter, LARGEST_WEIGHT)) == len(list(drafter.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_largest_weights_that_pass_keep_every_number_finite(kind, target_weights, dtype):
    """All of one sign, so that sums grow as fast as they can; the bound leaves room for layers of any real size."""
    drafter = kind.make(**({"draft_vocab_size": 40} if kind is EAGLE3 else {})).to(dtype)
    for parameter in drafter.parameters():
        parameter.fill_(LARGEST_WEIGHT)
    assert drafter.overflowing() == []
    batch, weights = make_batch((4, 8, 0)), []
    states, head = drafter.drafts(batch, align(batch, 3), target_weights)
    head = target_weights.head.to(dtype) if head.shape[1] == TARGET.hidden_size else head
    for hidden in states:
        assert hidden.isfinite().all()
        weights.append(hidden @ head.T)
    assert all(logits.isfinite().all() for logits in weights)


def test_the_tokens_that_can_be_drafted_ascend(kind, target_weights):
    drafter, batch = kind.make(), make_batch((3, 8, 0))
    counts = torch.arange(TARGET.vocab_size).roll(7)
    assert 0 < drafter.choose_vocabulary(counts, target_weights) <= 1
    tokens = drafter.draft_to_target
    assert (tokens.diff() > 0).all() and tokens[0] >= 0 and tokens[-1] < TARGET.vocab_size
    hidden, head = drafter.drafts(batch, align(batch, drafter.shape.trained_depth), target_weights)
    assert len(head) == len(tokens)
    of_states = head.detach()[:, : TARGET.hidden_size]  # a Markov head stands behind it
    assert torch.equal(of_states, target_weights.head[tokens]) != kind.has_own_matrices
    assert len(hidden) == drafter.shape.trained_depth


def test_nothing_is_accepted_behind_the_end_of_sequence(kind, target_weights, sampling):
    batch = make_batch((4, 8, 0), (6, 8, 0))
    batch.token_ids[11] = TARGET.eos_token_ids[0]  # the first rollout's last token
    (acceptance,) = acceptances([kind.make()], batch, target_weights, sampling)
    predicted = acceptance.offset + 1 + torch.arange(3)[:, None]  # offset of the token that position k drafts
    beyond, generated = predicted > 7, (predicted >= 0) & (predicted <= 7)
    ended, cut = acceptance.rollout == 0, acceptance.rollout == 1
    assert (beyond & ended).any() and (beyond & cut).any()
    for table in (acceptance.probability, acceptance.drawn):
        assert (table[beyond & ended] == 0).all()
        assert table[beyond & cut].isnan().all()
        assert table[generated].isfinite().all()
    assert (acceptance.probability[generated] > 0).all()


def test_packing_changes_no_loss(kind, target_weights, sampling):
    """Rollouts packed together score as the mean of the rollouts scored alone."""
    drafter = kind.make()
    together = make_batch((4, 8, 0), (6, 8, 0))
    batches = [together]
    for document in (0, 1):
        rows = together.document_ids == document
        fields = {f.name: getattr(together, f.name) for f in dataclasses.fields(together)}
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
        batches.append(dataclasses.replace(together, **part))
    packed, first, second = (drafter_loss(drafter, b, target_weights, sampling)[1] for b in batches)
    torch.testing.assert_close(packed, (first + second) / 2)
    parts = [acceptances([drafter], b, target_weights, sampling)[0] for b in batches]
    lengths = [acceptance_length(parts[:1], 3), acceptance_length(parts[1:], 3)]
    assert lengths[0] == pytest.approx(lengths[1])


def test_a_batch_without_supervision_has_zero_loss_and_gradient(kind, target_weights, sampling):
    drafter, batch = kind.make(), make_batch((5, 0, 0))
    loss, _ = drafter_loss(drafter, batch, target_weights, sampling)
    loss.backward()
    accepted = acceptances([drafter], batch, target_weights, sampling)
    assert loss == 0 and acceptance_length(accepted, 3) == 1.0
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert gradients and all((gradient == 0).all() for gradient in gradients.values())


def test_every_parameter_gets_a_gradient_and_nothing_of_the_target_does(kind, target_weights, sampling):
    drafter = kind.make()
    target = dataclasses.replace(
        target_weights,
        embedding=target_weights.embedding.clone().requires_grad_(),
        head=target_weights.head.clone().requires_grad_(),
    )
    drafter_loss(drafter, make_batch((3, 9, 0), (2, 6, 0)), target, sampling)[0].backward()
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []
    assert [name for name in ("embedding", "head") if getattr(target, name).grad is not None] == []


def test_the_drafter_learns(kind, sampling):
    """Rollouts that count upwards; features carry the token, the target is sure of the next one."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    target = TargetWeights(embedding, embedding, 0)
    batch = make_batch((4, 20, 0), (3, 20, 4), (6, 20, 0), dtype=torch.float32)
    tokens = (batch.positions + 7 * batch.document_ids) % 15 + 2
    states = embedding[tokens + 1].masked_fill(~batch.feature_mask[:, None], torch.nan)
    batch = dataclasses.replace(batch, token_ids=tokens, aux_hidden=states.repeat(1, 3), final_hidden=states)

    drafter = build_drafter(kind.config, kind.target, seed=0)
    drafter.choose_vocabulary(torch.bincount(tokens, minlength=TARGET.vocab_size), target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []

    def length() -> float:
        return acceptance_length(acceptances([drafter], batch, target, sampling), 3)

    assert length() < 2.0
    for _ in range(100):
        loss, _ = drafter_loss(drafter, batch, target, sampling)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0] and length() > 3.5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [5, 512])
def test_drafters_scored_together_score_as_alone(kind, target_weights, monkeypatch, temperature, chunk_tokens):
    """Whatever their kinds, weights and vocabularies; the target's distribution is computed once for all of them."""
    monkeypatch.setattr("drafters.losses.CHUNK_TOKENS", chunk_tokens)
    batch = make_batch((4, 8, 0), (6, 8, 1))
    sampling = SamplingParams(temperature, 0.9, 0, "probabilistic")
    drafters = [kind.make(seed=0), kind.make(seed=1), make_drafter(seed=2, draft_vocab_size=40)]
    drafters[1].choose_vocabulary(torch.arange(40.0), target_weights)
    alone = [acceptances([drafter], batch, target_weights, sampling)[0] for drafter in drafters]
    rows = []
    once = Teacher.processed_logits
    monkeypatch.setattr(
        Teacher, "processed_logits", lambda self, chunk: rows.extend(chunk.tolist()) or once(self, chunk)
    )
    together = acceptances(drafters, batch, target_weights, sampling)
    assert len(rows) == len(set(rows)) > 10
    for ours, theirs in zip(together, alone, strict=True):
        for field in dataclasses.fields(ours):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    # A draft is accepted or not at temperature 0, so that two drafters may agree everywhere.
    assert temperature == 0 or not torch.equal(*(ours.probability.nan_to_num() for ours in together[:2]))
