"""Weight updates on vLLM's own models: whole updates or none, and the way back when a check fails late."""

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cotrain.engine import loading as vllm_weights
from cotrain.engine.served import READBACK_COLUMNS, ServedWeights, on_all_ranks
from cotrain.weights.payload import WeightUpdateRefused, write_payload
from pipelines.preflight import POLICY_UPDATES_HELD
from tests.cotrain.engine.conftest import moved
from tests.cotrain.engine.test_vllm_weights import SERVED


class Session:
    """What a worker serves, with a folder for payloads."""

    def __init__(self, target, drafter, folder: Path):
        self.target, self.drafter, self.folder = target, drafter, folder
        kept = folder / "kept"
        self.weights = {False: ServedWeights(target.model, target.model_config, kept / "target")}
        if drafter is not None:
            drafter_weights = ServedWeights(drafter.model, drafter.model_config, kept / "drafter", target.model)
            self.weights[True] = drafter_weights

    def send(self, state, draft=False, name="sent.safetensors", action="update", **options) -> None:
        payload = write_payload(state, self.folder / name, torch.float32)
        getattr(self.weights[draft], action)(payload.path, payload.digests, **options)

    def serves(self, served, state) -> bool:
        return vllm_weights.differing_tensors(served.model, state) == []

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "kept").iterdir())


@pytest.fixture
def session(target_and_drafter, tmp_path):
    """A session on models that serve their checkpoints."""
    for served in target_and_drafter:
        vllm_weights.reload_weights(served.model, served.model_config, served.state)
    return Session(*target_and_drafter, tmp_path)


@pytest.fixture
def once_wrong(monkeypatch):
    """The next reload serves something else than it was given."""
    reload, spoilt = vllm_weights.reload_weights, []

    def reload_wrongly(model, model_config, tensors):
        if not spoilt:
            spoilt.append(name := next(n for n in tensors if n.endswith("down_proj.weight")))
            tensors = tensors | {name: tensors[name] + 1.0}
        reload(model, model_config, tensors)

    monkeypatch.setattr(vllm_weights, "reload_weights", reload_wrongly)


def test_target_and_drafter_are_updated_apart(session):
    target, drafter = moved(session.target.state), moved(session.drafter.state, seed=2)
    session.send(target)
    session.send(drafter, draft=True)
    assert session.serves(session.target, target)
    assert session.serves(session.drafter, drafter)
    assert session.kept() == ["drafter.safetensors", "target.safetensors"]


def test_what_was_checked_ahead_is_served_and_held_whatever_has_its_name_since(session):
    first, second = moved(session.target.state, seed=1), moved(session.target.state, seed=2)
    weights, sent = session.weights[False], session.folder / "sent.safetensors"
    payload = write_payload(first, sent, torch.float32)
    weights.check(payload.path, payload.digests)
    assert session.serves(session.target, session.target.state)
    write_payload(second, sent, torch.float32)
    weights.update(payload.path, payload.digests)
    assert session.serves(session.target, first)
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights.last_good().items())
    with pytest.raises(WeightUpdateRefused, match="checksum differs"):  # what was checked ahead serves one update
        weights.update(payload.path, payload.digests)


def test_an_update_that_was_not_the_one_checked_ahead_is_checked_itself(session):
    first, second = moved(session.target.state, seed=1), moved(session.target.state, seed=2)
    session.send(first, action="check")
    session.send(second)
    assert session.serves(session.target, second)
    session.send(first, action="check")
    with pytest.raises(WeightUpdateRefused, match="non-finite"):
        session.send({name: tensor * float("nan") for name, tensor in first.items()}, action="check")
    with pytest.raises(WeightUpdateRefused, match="non-finite"):
        session.send({name: tensor * float("nan") for name, tensor in first.items()})
    assert session.serves(session.target, second)


@pytest.mark.parametrize("draft", [False, True])
def test_a_reload_that_goes_wrong_is_undone_to_the_checkpoint(session, once_wrong, draft):
    served = session.drafter if draft else session.target
    with pytest.raises(WeightUpdateRefused, match=r"update undone: served weights differ.*down_proj"):
        session.send(moved(served.state), draft=draft)
    assert session.serves(served, served.state)


@pytest.mark.parametrize("draft", [False, True])
def test_a_reload_that_goes_wrong_is_undone_to_the_last_update(session, draft, request):
    served = session.drafter if draft else session.target
    good = moved(served.state)
    session.send(good, draft=draft)
    request.getfixturevalue("once_wrong")
    with pytest.raises(WeightUpdateRefused, match="update undone"):
        session.send(moved(good, seed=3), draft=draft)
    assert session.serves(served, good)
    session.send(moved(good, seed=3), draft=draft)
    assert session.serves(served, moved(good, seed=3))


def test_a_reload_that_fails_is_undone(session, monkeypatch):
    reload, calls = vllm_weights.reload_weights, []

    def fail_once(model, model_config, tensors):
        calls.append(len(tensors))
        if len(calls) == 1:
            tensors = dict(list(tensors.items())[:3]) | {"model.norm.weight": torch.zeros(1, 2, 3)}
        reload(model, model_config, tensors)

    monkeypatch.setattr(vllm_weights, "reload_weights", fail_once)
    with pytest.raises(WeightUpdateRefused, match="update undone"):
        session.send(moved(session.target.state))
    assert session.serves(session.target, session.target.state)


@pytest.mark.parametrize("column", [0, 50, 95])
def test_a_column_that_stays_wrong_is_found_within_the_stated_updates(session, monkeypatch, column):
    """With 8 of 96 columns compared in each update that is 12 updates."""
    reload = vllm_weights.reload_weights
    name = next(n for n in session.target.state if n.endswith("down_proj.weight"))

    def reload_wrongly(model, model_config, tensors):
        wrong = tensors[name].clone()
        wrong[:, column] += 1e-3
        reload(model, model_config, tensors | {name: wrong})

    monkeypatch.setattr(vllm_weights, "reload_weights", reload_wrongly)
    monkeypatch.setattr(session.weights[False], "restore", lambda: reload(*_loaded(session)))
    for first in (1, 6):
        with pytest.raises(WeightUpdateRefused, match=rf"served weights differ.*{name}"):
            for version in range(first, first + 96 // READBACK_COLUMNS):
                session.send(session.target.state, turn=version)


def _loaded(session):
    return session.target.model, session.target.model_config, session.target.state


@pytest.mark.parametrize("name", ["embed_tokens.weight", "model.embed_tokens.weight"])
def test_a_drafter_update_cannot_carry_the_targets_embedding(session, name):
    bad = session.drafter.state | {name: torch.zeros(500, 128)}
    with pytest.raises(WeightUpdateRefused, match="not expected"):
        session.send(bad, draft=True)
    assert session.serves(session.target, session.target.state)
    assert session.serves(session.drafter, session.drafter.state)


def test_not_even_when_its_checkpoint_has_one(target_and_drafter, session, tmp_path, monkeypatch):
    """vLLM lets a drafter whose embedding equals the target's borrow the target's."""
    checkpoint = tmp_path / "with_embedding"
    checkpoint.mkdir()
    with_embedding = session.drafter.state | {"embed_tokens.weight": torch.zeros(500, 128)}
    save_file(with_embedding, checkpoint / "model.safetensors")
    monkeypatch.setattr(session.drafter.model_config, "model", str(checkpoint))
    session = Session(*target_and_drafter, tmp_path)
    with pytest.raises(WeightUpdateRefused, match=r"not expected: \['embed_tokens\.weight'\]"):
        session.send(with_embedding, draft=True)
    session.send(session.drafter.state, draft=True)
    assert session.serves(session.target, session.target.state)


def test_half_an_update_is_refused(session):
    """vLLM would load it, and fill the rest of a fused projection with whatever is in memory."""
    half = {name: t for name, t in moved(session.target.state).items() if "k_proj" not in name}
    with pytest.raises(WeightUpdateRefused, match=r"missing: .*k_proj"):
        session.send(half)
    assert session.serves(session.target, session.target.state)


def test_a_refused_update_is_not_kept(session, once_wrong):
    with pytest.raises(WeightUpdateRefused):
        session.send(moved(session.target.state))
    assert "target.safetensors" not in session.kept()


def test_the_good_state_outlives_its_payload(session, request):
    good = moved(session.target.state)
    session.send(good, name="first.safetensors")
    (session.folder / "first.safetensors").unlink()
    request.getfixturevalue("once_wrong")
    with pytest.raises(WeightUpdateRefused):
        session.send(moved(good), name="second.safetensors")
    assert session.serves(session.target, good)


def test_an_update_that_cannot_be_kept_changes_nothing(session, monkeypatch):
    def other_file_system(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    with pytest.raises(WeightUpdateRefused, match="cross-device"):
        session.send(moved(session.target.state))
    assert session.serves(session.target, session.target.state)


def test_a_tied_head_is_neither_expected_nor_stale(serve, tmp_path):
    served = serve("llama, tied embeddings", "float32")
    session = Session(served, None, tmp_path)
    update = moved(served.state)
    session.send(update)
    assert session.serves(served, update)
    with pytest.raises(WeightUpdateRefused, match=r"not expected: \['lm_head\.weight'\]"):
        session.send(update | {"lm_head.weight": torch.zeros(500, 128)})


def held_bytes(folder: Path) -> int:
    """Bytes of all files, those with several names once."""
    found = {(stat := path.stat()).st_ino: stat.st_size for path in folder.rglob("*") if path.is_file()}
    return sum(found.values())


@pytest.mark.parametrize(("draft", "between", "while_writing"), [(False, 1, POLICY_UPDATES_HELD), (True, 2, 3)])
def test_no_more_updates_are_held_than_a_restore_or_an_undo_needs(session, monkeypatch, draft, between, while_writing):
    """A drafter update can be undone, so the one before it is held as well. For policies preflight asks for the most."""
    served = session.drafter if draft else session.target
    replace, most, after = os.replace, [], []

    def watched(source, target):
        most.append(held_bytes(session.folder))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    for version in range(4):
        session.send(moved(served.state, seed=version), draft=draft, turn=version)
        while not draft and any(session.folder.rglob("*.before")):  # it is deleted in a thread
            time.sleep(0.01)
        after.append(held_bytes(session.folder))
    size = (session.folder / "sent.safetensors").stat().st_size
    print(f"held after each update {[f'{n / size:.2f}' for n in after]}, most {max(most) / size:.2f}")
    assert max(after) == between * size
    assert max(most) == while_writing * size


@pytest.fixture
def always_wrong(monkeypatch):
    """Every reload from now on serves something else than it was given: the restore too."""
    reload = vllm_weights.reload_weights

    def reload_wrongly(model, model_config, tensors):
        name = next(n for n in tensors if n.endswith("down_proj.weight"))
        reload(model, model_config, tensors | {name: tensors[name] + 1.0})

    monkeypatch.setattr(vllm_weights, "reload_weights", reload_wrongly)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("updates", [0, 1])
def test_a_restore_that_goes_wrong_is_no_refusal(session, request, draft, updates):
    """After a refusal the engine would go on."""
    served = session.drafter if draft else session.target
    for version in range(updates):
        session.send(moved(served.state, seed=version), draft=draft)
    request.getfixturevalue("always_wrong")
    with pytest.raises(RuntimeError, match=r"weights are unknown: .*served weights differ.*down_proj"):
        session.send(moved(served.state, seed=7), draft=draft)


def test_an_undo_that_goes_wrong_is_no_refusal(session, request):
    session.send(moved(session.drafter.state), draft=True)
    request.getfixturevalue("always_wrong")
    with pytest.raises(RuntimeError, match="weights are unknown"):
        session.weights[True].undo()


def test_a_check_touches_nothing_that_is_served(session):
    update = moved(session.drafter.state)
    session.send(update, draft=True, action="check")
    assert session.serves(session.drafter, session.drafter.state)
    assert session.kept() == ["drafter.new"], "which the next update serves, or the next check forgets"
    name = next(n for n in update if n.endswith("down_proj.weight"))
    broken = update | {name: update[name] * float("nan")}
    with pytest.raises(WeightUpdateRefused, match="non-finite"):
        session.send(broken, draft=True, action="check")


@pytest.mark.parametrize("updates", [1, 2])
def test_the_last_update_can_be_undone(session, updates):
    """With one update before, back to that; with none, to the checkpoint."""
    states = [session.drafter.state, *(moved(session.drafter.state, seed=i) for i in range(updates))]
    for i, state in enumerate(states[1:]):
        session.send(state, draft=True, name=f"sent_{i}.safetensors")
    session.weights[True].undo()
    assert session.serves(session.drafter, states[-2])
    assert session.serves(session.target, session.target.state)


def test_after_an_update_that_was_undone_a_bad_one_ends_at_the_same_state(session, request):
    update = moved(session.drafter.state, seed=1)
    session.send(update, draft=True)
    session.send(moved(session.drafter.state, seed=2), draft=True, name="second.safetensors")
    session.weights[True].undo()
    request.getfixturevalue("once_wrong")
    with pytest.raises(WeightUpdateRefused, match="update undone"):
        session.send(moved(session.drafter.state, seed=3), draft=True, name="third.safetensors")
    assert session.serves(session.drafter, update)


def test_a_step_that_fails_without_a_word_fails_all_the_same(session):
    def step() -> None:
        raise AssertionError

    with pytest.raises(WeightUpdateRefused, match=r"^AssertionError\(\)$"):
        on_all_ranks(step)


ATTENTION = (".self_attn.", ".linear_attn.")


@pytest.mark.parametrize("architecture", [name for name in SERVED if name != "phi3, whose checkpoints are fused"])
def test_an_update_of_adapters_leaves_all_other_weights_as_they_were(serve, experts_are_packed, tmp_path, architecture):
    """It carries the attention of each layer, and goes back to the checkpoint of what it carries."""
    dtype = SERVED[architecture]
    served = serve(architecture, dtype)
    weights = ServedWeights(served.model, served.model_config, tmp_path / "kept", adapters=True)
    changed = {name: tensor for name, tensor in served.state.items() if any(part in name for part in ATTENTION)}
    assert 0 < len(changed) < len(served.state)
    for seed in (1, 2):
        update = moved(changed, seed=seed)
        payload = write_payload(update, tmp_path / "sent.safetensors", getattr(torch, dtype))
        weights.update(payload.path, payload.digests)
        assert vllm_weights.differing_tensors(served.model, served.state | update) == []
        good = weights.last_good()
        assert all(torch.equal(tensor, good[name]) for name, tensor in (served.state | update).items() if name in good)
    weights.restore()
    assert vllm_weights.differing_tensors(served.model, served.state | update) == []


def test_an_update_of_adapters_that_goes_wrong_is_undone(serve, tmp_path, monkeypatch):
    served = serve("llama", "float32")
    weights = ServedWeights(served.model, served.model_config, tmp_path / "kept", adapters=True)
    update = moved({name: tensor for name, tensor in served.state.items() if ".mlp." in name})
    payload = write_payload(update, tmp_path / "sent.safetensors", torch.float32)
    reload, calls = vllm_weights.reload_modules, []

    def wrong_once(model, model_config, tensors):
        calls.append(len(tensors))
        wrong = {name: tensor + 1.0 for name, tensor in tensors.items()} if len(calls) == 1 else tensors
        reload(model, model_config, wrong)

    monkeypatch.setattr(vllm_weights, "reload_modules", wrong_once)
    with pytest.raises(WeightUpdateRefused, match="update undone"):
        weights.update(payload.path, payload.digests)
    assert len(calls) == 2 and vllm_weights.differing_tensors(served.model, served.state) == []


def test_an_update_of_adapters_carries_all_that_vllm_fuses(serve, tmp_path):
    """Else the key and value projections would be what memory happened to hold."""
    served = serve("qwen2, with biases", "float32")
    weights = ServedWeights(served.model, served.model_config, tmp_path / "kept", adapters=True)
    projections = {name: tensor for name, tensor in served.state.items() if ".self_attn." in name}
    some = {name: tensor for name, tensor in projections.items() if ".q_proj." in name}
    foreign = projections | {"another.weight": torch.zeros(1)}
    for state, reason in ((some, r"tensors missing:.*loads together"), (foreign, "not expected.*another")):
        payload = write_payload(state, tmp_path / "sent.safetensors", torch.float32)
        with pytest.raises(WeightUpdateRefused, match=reason):
            weights.update(payload.path, payload.digests)
    without_bias = {name: tensor for name, tensor in projections.items() if not name.endswith("bias")}
    payload = write_payload(without_bias, tmp_path / "sent.safetensors", torch.float32)
    with pytest.raises(WeightUpdateRefused, match="loads together"):
        weights.check(payload.path, payload.digests)
    assert vllm_weights.differing_tensors(served.model, served.state) == []
