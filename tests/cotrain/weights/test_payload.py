"""Weights as files: described, written whole or not at all, and refused when anything is off."""

import json
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotrain.weights.payload import (
    WeightUpdateRefused,
    digest,
    read_manifest,
    read_payload,
    write_payload,
    write_tensors,
)

STATE = {
    "layers.0.weight": torch.linspace(-1, 1, 12).reshape(3, 4),
    "norm.weight": torch.ones(4),
    "d2t": torch.tensor([0, 3, 5]),
}
EXPECTED = {
    "layers.0.weight": ((3, 4), torch.float32),
    "norm.weight": ((4,), torch.float32),
    "d2t": ((3,), torch.int64),
}


def test_a_payload_is_read_back_as_written(tmp_path):
    payload = write_payload(STATE, tmp_path / "w.safetensors", torch.float32)
    assert payload.num_bytes == Path(payload.path).stat().st_size
    read = read_payload(payload.path, payload.digests, EXPECTED)
    assert read.keys() == STATE.keys()
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


def test_floating_tensors_are_cast_and_integers_are_not(tmp_path):
    state = STATE | {"half.weight": torch.full((2,), 0.1, dtype=torch.float16)}
    payload = write_payload(state, tmp_path / "w.safetensors", torch.bfloat16)
    written = load_file(payload.path)
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        "layers.0.weight": torch.bfloat16,
        "norm.weight": torch.bfloat16,
        "half.weight": torch.bfloat16,
        "d2t": torch.int64,
    }
    assert torch.equal(written["layers.0.weight"], STATE["layers.0.weight"].bfloat16())
    assert payload.digests == {name: digest(tensor) for name, tensor in written.items()}


def test_learners_tensors_are_written_as_they_are(tmp_path):
    transposed = STATE["layers.0.weight"].t().requires_grad_()
    payload = write_payload({"w": transposed}, tmp_path / "w.safetensors", torch.float32)
    assert torch.equal(load_file(payload.path)["w"], transposed.detach())


def test_a_tensor_outlives_its_file_and_the_next_one_of_that_name(tmp_path):
    payload = write_payload(STATE, tmp_path / "w.safetensors", torch.float32)
    read = read_payload(payload.path, payload.digests, EXPECTED)
    write_payload({name: torch.zeros_like(tensor) for name, tensor in STATE.items()}, payload.path, torch.float32)
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)
    Path(payload.path).unlink()
    assert all(torch.equal(read[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 1234, 4999])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(tmp_path, dtype, position, value):
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    tensor[position] = float(value)
    payload = write_payload({"w": tensor}, tmp_path / "w.safetensors", dtype)
    with pytest.raises(WeightUpdateRefused, match="w has non-finite values"):
        read_payload(payload.path, payload.digests, {"w": ((5000,), dtype)})


def test_a_digest_is_of_the_values_in_row_major_order():
    weight = STATE["layers.0.weight"]
    assert digest(weight.t().contiguous().t()) == digest(weight)
    assert digest(weight.t()) != digest(weight)
    assert digest(weight.bfloat16()) != digest(weight)
    changed = weight.clone()
    changed[2, 3] += 1e-6
    assert digest(changed) != digest(weight)
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5]))


@pytest.fixture
def full_disk():
    """Files can grow to 64 KiB: the write fails in its middle, as on a full disk, in the library's own code."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_last_payload_and_nothing_else(tmp_path, full_disk):
    path = tmp_path / "w.safetensors"
    first = write_payload(STATE, path, torch.float32)
    with pytest.raises(OSError, match=r"cannot write .*w\.safetensors"):
        write_payload({"w": torch.zeros(2**20)}, path, torch.float32)
    assert list(tmp_path.iterdir()) == [path]
    read_payload(str(path), first.digests, EXPECTED)


def test_a_crash_while_writing_leaves_nothing_under_the_name(tmp_path):
    def half():
        yield "norm.weight", STATE["norm.weight"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(EXPECTED, half(), tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_that_of_the_safetensors_library_in_whatever_order_tensors_come(tmp_path):
    state = STATE | {"flag": torch.tensor([True, False, True]), "none": torch.zeros(0, 4), "one": torch.tensor(2.5)}
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    payload = write_tensors(layout, reversed(state.items()), tmp_path / "w.safetensors")
    save_file(state, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    assert Path(payload.path).read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert payload.digests == {name: digest(tensor) for name, tensor in state.items()}


def test_a_tensor_that_never_comes_or_is_another_makes_no_file(tmp_path):
    short = STATE | {"norm.weight": torch.ones(2)}
    for tensors in (list(STATE.items())[:-1], short.items()):
        with pytest.raises(AssertionError, match=r"norm\.weight|d2t"):
            write_tensors(EXPECTED, tensors, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------
# Manifest
# ---------------------------------------------------------------------------------------------------------------


def test_the_manifest_has_the_engines_dtype_and_leaves_out_what_is_never_sent(tmp_path):
    state = STATE | {"t2d": torch.ones(8, dtype=torch.bool), "model.embed_tokens.weight": torch.zeros(8, 4)}
    save_file(state, tmp_path / "model.safetensors")
    manifest = read_manifest(tmp_path, torch.bfloat16, without=["t2d", "embed_tokens.weight"])
    assert manifest == {
        "layers.0.weight": ((3, 4), torch.bfloat16),
        "norm.weight": ((4,), torch.bfloat16),
        "d2t": ((3,), torch.int64),
    }


def test_the_manifest_of_a_sharded_checkpoint_follows_its_index(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"tok_embeddings": torch.zeros(9)}, tmp_path / "consolidated.safetensors")  # the same, in other names
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_manifest(tmp_path, torch.float32) == {"a": ((2,), torch.float32), "b": ((3,), torch.float32)}


def test_a_folder_without_weights_has_no_manifest(tmp_path):
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        read_manifest(tmp_path, torch.float32)


# ---------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------

NAN, INFINITE = torch.tensor([1.0, float("nan"), 1.0, 1.0]), torch.tensor([1.0, 1.0, -float("inf"), 1.0])
BAD_STATES = {
    "missing": ({n: t for n, t in STATE.items() if n != "d2t"}, r"missing: \['d2t'\]"),
    "extra": (STATE | {"surprise": torch.zeros(1)}, r"not expected: \['surprise'\]"),
    "shape": (STATE | {"norm.weight": torch.ones(5)}, r"norm\.weight is \(5,\) .*serves \(4,\)"),
    "dtype": (STATE | {"norm.weight": torch.ones(4).double()}, r"norm\.weight is .*float64.*serves .*float32"),
    "integer dtype": (STATE | {"d2t": STATE["d2t"].int()}, r"d2t is .*int32.*serves .*int64"),
    "nan": (STATE | {"norm.weight": NAN}, r"norm\.weight has non-finite values"),
    "infinite": (STATE | {"norm.weight": INFINITE}, r"norm\.weight has non-finite values"),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_a_wrong_update_is_refused(tmp_path, kind):
    state, message = BAD_STATES[kind]
    path = tmp_path / "w.safetensors"
    save_file(state, path)
    with pytest.raises(WeightUpdateRefused, match=message):
        read_payload(str(path), {name: digest(tensor) for name, tensor in state.items()}, EXPECTED)


def test_bytes_that_changed_on_the_way_are_refused(tmp_path):
    payload = write_payload(STATE, tmp_path / "w.safetensors", torch.float32)
    with open(payload.path, "r+b") as file:
        file.seek(-8, 2)
        file.write(b"\x01\x02\x03\x3f")
    with pytest.raises(WeightUpdateRefused, match="not the tensor the sender wrote"):
        read_payload(payload.path, payload.digests, EXPECTED)


def test_a_tensor_without_a_digest_is_refused(tmp_path):
    payload = write_payload(STATE, tmp_path / "w.safetensors", torch.float32)
    with pytest.raises(WeightUpdateRefused, match="not the tensor the sender wrote"):
        read_payload(payload.path, {}, EXPECTED)


@pytest.mark.parametrize("kept_share", [0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, kept_share):
    payload = write_payload(STATE, tmp_path / "w.safetensors", torch.float32)
    with open(payload.path, "r+b") as file:
        file.truncate(int(payload.num_bytes * kept_share))
    with pytest.raises(WeightUpdateRefused, match="cannot read"):
        read_payload(payload.path, payload.digests, EXPECTED)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WeightUpdateRefused, match="cannot read"):
        read_payload(str(tmp_path / "nowhere.safetensors"), {}, EXPECTED)
