"""FSDP2 in two real processes and in one, against a learner that is whole."""

import json
from pathlib import Path

import pytest
import torch
from policy_cases import ROLLOUT, free_ports, make_learner, make_rollouts, merged_by_peft, run_ranks, save_tiny_model
from policy_ddp_rank import one_advantage
from policy_fsdp_rank import BFLOAT16, MICRO_BATCH_TOKENS, VARIANTS, Outcome, go_on, run_rank, use
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cotrain.policy.batching import micro_batches, share_of_rank
from cotrain.weights.payload import digest

LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}


@pytest.fixture(scope="module")
def models(tiny_model: str, untied_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    large = save_tiny_model(tmp_path_factory.mktemp("large"), "llama", **LARGE)
    experts = save_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_next")
    return {
        "tiny_model": tiny_model,
        "untied_model": untied_model,
        "large_model": large,
        "experts_model": experts,
    }


@pytest.fixture(scope="module")
def folder(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have written, in the end; they were given what one whole learner had saved."""
    folder = tmp_path_factory.mktemp("fsdp")
    whole = make_learner(models["tiny_model"])
    whole.update(make_rollouts(models["tiny_model"]))
    whole.save(folder / "saved_whole")
    run_ranks(run_rank, free_ports(3), models, str(folder), seconds=240)
    return folder


def read(file: Path) -> Outcome:
    return json.loads(file.with_suffix(".json").read_text()), load_file(file.with_suffix(".safetensors"))


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


MOST_ROUNDED = 3
"""Elements of a tensor in bfloat16 that may be the next number, where float32 was just at the edge; one is measured."""


def assert_close(one: Outcome, other: Outcome) -> None:
    """Within the rounding of float32, by which a weight may be the next one in bfloat16."""
    for step, expected in zip(*(outcome[0] for outcome in (one, other)), strict=True):
        assert step["policy/loss"] == pytest.approx(expected["policy/loss"], abs=1e-6)
        assert step["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-5)
        assert step == pytest.approx(expected, rel=2e-5, abs=1e-7)
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        expected_tensor = other[1][name]
        if tensor.dtype == torch.bfloat16:
            num_others = (tensor != expected_tensor).sum()
            # 2**-7 is the largest distance of neighbours, relative to them; near 0 it is what float32 rounds by.
            near = torch.allclose(tensor, expected_tensor, rtol=2**-7, atol=2e-5 * float(expected_tensor.abs().max()))
            assert num_others <= MOST_ROUNDED and near, name
        else:
            assert (tensor - expected_tensor).norm() <= 2e-5 * expected_tensor.norm(), name


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "bfloat16"])
def test_two_ranks_compute_what_one_whole_learner_does(models: dict[str, str], folder: Path, name: str) -> None:
    model, policy = VARIANTS[name]
    expected = use(make_learner(models[model], BFLOAT16, **policy), models[model])
    for rank in range(2):
        assert_close(read(folder / f"{name}-{rank}"), expected)


def test_two_ranks_compute_in_bfloat16(models: dict[str, str], folder: Path) -> None:
    """AdamW makes much of small differences, so that the first step alone is the same."""
    model, policy = VARIANTS["bfloat16"]
    learner = make_learner(models[model], BFLOAT16, micro_batch_tokens=MICRO_BATCH_TOKENS, **policy)
    metrics, _ = use(learner, models[model])
    for rank in range(2):
        found, _ = read(folder / f"bfloat16-{rank}")
        assert found[0] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
        assert found[-1]["policy/loss"] == pytest.approx(metrics[-1]["policy/loss"], abs=0.02)


def test_the_ranks_had_unequal_work(models: dict[str, str]) -> None:
    """Which is what they are to be compared with one learner for."""
    model = models["tiny_model"]
    for rollouts in (make_rollouts(model)[:11], one_advantage(model)):
        shares = [share_of_rank(rollouts, rank, 2) for rank in range(2)]
        cpu = torch.device("cpu")
        counts = [
            [
                len(micro_batches([s for s in share if (s.advantage != 0) == trains], MICRO_BATCH_TOKENS, cpu))
                for share in shares
            ]
            for trains in (False, True)
        ]
        assert any(one != other for one, other in counts), counts


def test_one_rank_alone_computes_to_the_bit_what_a_whole_learner_does(models: dict[str, str], folder: Path) -> None:
    whole = make_learner(models["tiny_model"])
    assert_equal(read(folder / "alone"), use(whole, models["tiny_model"]))
    assert_equal(read(folder / "alone_on"), go_on(whole, models["tiny_model"]))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "adapters"])
def test_the_streamed_file_is_the_cast_whole_state_byte_for_byte(folder: Path, name: str) -> None:
    written = folder / f"{name}.payload"
    assert written.read_bytes() == (folder / f"{name}.whole").read_bytes()
    digests = {key: digest(tensor) for key, tensor in load_file(written).items()}
    assert json.loads((folder / f"{name}.digests").read_text()) == digests


def test_adapters_of_two_ranks_are_merged_as_peft_does(models: dict[str, str], folder: Path) -> None:
    merged = merged_by_peft(models["tiny_model"], folder / "adapters.saved", "bfloat16")
    sent = load_file(folder / "adapters.payload")
    assert sent and all(torch.equal(tensor, merged[name]) for name, tensor in sent.items())


def test_streaming_takes_little_memory_on_any_rank(folder: Path) -> None:
    whole = (folder / "large.payload").stat().st_size * 2  # as float32
    assert whole > 24 * 2**20
    assert max(int((folder / f"peak-{rank}").read_text()) for rank in range(2)) < 0.25 * whole


def test_the_saved_folder_is_a_hugging_face_model(models: dict[str, str], folder: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(models["tiny_model"], dtype=torch.float32)
    expected.save_pretrained(tmp_path)
    saved = folder / "saved_by_2"
    for name in ("config.json", "generation_config.json"):
        assert (saved / name).read_text() == (tmp_path / name).read_text()
    _, state = read(folder / "two-0")
    weights = load_file(saved / "model.safetensors")
    assert weights.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(torch.equal(weights[name], state[name]) for name in weights)


def test_two_ranks_continue_to_the_bit(folder: Path) -> None:
    for rank in range(2):
        assert_equal(read(folder / f"from_2_to_2-{rank}"), read(folder / f"two_on-{rank}"))
    assert_equal(read(folder / "two_on-0"), read(folder / "two_on-1"))


def test_other_numbers_of_ranks_continue(models: dict[str, str], folder: Path) -> None:
    assert_close(read(folder / "from_2_to_1"), read(folder / "two_on-0"))
    assert_close(read(folder / "from_1_to_2-1"), read(folder / "alone_on"))

    def continued_whole(saved: str) -> Outcome:
        whole = make_learner(models["tiny_model"])
        whole.load(folder / saved)
        return go_on(whole, models["tiny_model"])

    assert_equal(continued_whole("saved_by_1"), read(folder / "alone_on"))
    assert_equal(continued_whole("saved_by_2"), read(folder / "from_2_to_1"))
    assert_close(read(folder / "from_whole-0"), continued_whole("saved_whole"))


def test_a_failure_of_one_rank_leaves_no_other_waiting(folder: Path) -> None:
    assert "cannot write" in (folder / "disk-0").read_text()
    assert not (folder / "disk-1").exists()
    for rank in range(2):
        assert "not finite: p1/1." in (folder / f"error-{rank}").read_text()


def test_sharding_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # tests of vLLM's worker may have one
    with pytest.raises(ValueError, match=r"policy\.sharding shards over a process group.*set RANK, LOCAL_RANK"):
        make_learner("/nonexistent", ROLLOUT, sharding="fsdp2")
