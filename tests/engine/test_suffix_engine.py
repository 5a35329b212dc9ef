"""Drafting from history on the real engine: what it leaves as it is, and what it accepts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cotrain.config.schema import HistoryConfig, RolloutConfig, SpeculationConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutBatch
from tests.engine.conftest import LiveEngine, make_requests, tokens
from tests.engine.planted_drafts import FAULTS, LENGTHS, PRICES, Planting
from tests.engine.test_sampling import NUM_SAMPLES, Laws, laws, p_values, samples  # noqa: F401

pytestmark = pytest.mark.engine

PLANTING = "tests.engine.planted_drafts.PlantingWorker"


@pytest.fixture(scope="module")
def historian(rollout_config: RolloutConfig, target_folder: Path) -> Iterator[LiveEngine]:
    """An engine that drafts from what it has generated."""
    changes = {"prompts_per_step": 256, "synchronous_batches": True, "speculation": SpeculationConfig()}
    changes |= {"history": HistoryConfig(max_bytes=2**22)}
    config = rollout_config.model_copy(update=changes)
    vllm = config.vllm | {"worker_extension_cls": PLANTING, "max_num_seqs": 32}
    config = config.model_copy(update={"vllm": vllm})
    with scratch_folder("test-suffix") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), None, None, 0, str(scratch)))
        yield live
        live.stop()


@pytest.fixture(autouse=True)
def as_at_the_start(historian: LiveEngine) -> None:
    """Each test begins with an empty history, three draft tokens and no fault, whatever ran before."""
    historian.run(historian.engine.on_workers(Planting.plant, None))
    historian.run(historian.engine.on_workers(Planting.forget_history))
    historian.run(historian.engine.set_num_speculative_tokens(3))


def assert_history_was_right(batch: RolloutBatch) -> None:
    """Nearly all draft tokens were accepted, and there were some."""
    drafted, accepted = (sum(column) for column in zip(*batch.speculation.elements(), strict=True))
    assert accepted > 0.9 * drafted > 50


def test_greedy_text_is_that_of_no_speculation_with_and_without_a_history(historian: LiveEngine) -> None:
    requests = make_requests(12, seed=11)
    historian.run(historian.engine.set_num_speculative_tokens(0))
    plain = tokens(historian.greedy(requests, tap=False))
    for k, fault in ((3, None), (1, None), (3, None), (3, LENGTHS)):
        historian.run(historian.engine.set_num_speculative_tokens(k))
        historian.run(historian.engine.on_workers(Planting.plant, fault))
        batch = historian.greedy(requests, tap=False)
        assert tokens(batch) == plain
        assert_history_was_right(batch)  # the same texts have been generated before


def test_greedy_text_is_the_same_when_weights_change_in_mid_generation(
    historian: LiveEngine, target_state: dict[str, torch.Tensor]
) -> None:
    """Requests in flight are computed again, and the drafts of before are dropped."""
    requests = make_requests(12, seed=11)
    plain = tokens(historian.greedy(requests, tap=False))
    payloads = [historian.payload(target_state) for _ in range(2)]

    async def generate_and_swap() -> RolloutBatch:
        engine = historian.engine
        task = asyncio.create_task(engine.generate(requests, tap=False, temperature=0.0, seed=None))
        for payload in payloads:
            await asyncio.sleep(0.05)
            await engine.update_policy(payload, engine.versions.policy + 1)
        return await task

    batch = historian.run(generate_and_swap())
    assert tokens(batch) == plain and any(len(rollout.segments) > 1 for rollout in batch.rollouts)
    assert_history_was_right(batch)


def test_text_has_the_targets_law_and_so_have_the_laws_that_are_handed_over(
    historian: LiveEngine,
    laws: Laws,  # noqa: F811
) -> None:
    samples(historian, number=512, temperature=1.0)
    historian.run(historian.engine.on_workers(Planting.plant, LENGTHS))
    sampled, speculation = samples(historian, seeded=False, temperature=1.0)
    historian.run(historian.engine.on_workers(Planting.plant, None))
    assert speculation.accepted_per_position[1] > NUM_SAMPLES / 50
    assert min(p_values(laws, sampled, 1.0, -1)) > 1e-4


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault == "anticipates" else pytest.mark.long) for fault in FAULTS]
)
def test_planted_faults_change_the_law(historian: LiveEngine, laws: Laws, fault: str) -> None:  # noqa: F811
    samples(historian, number=512, temperature=1.0)  # which the history then knows
    historian.run(historian.engine.on_workers(Planting.plant, fault))
    sampled, _ = samples(historian, seeded=False, temperature=1.0)
    historian.run(historian.engine.on_workers(Planting.plant, None))
    assert min(p_values(laws, sampled, 1.0, -1)) < 1e-4


def test_a_saved_history_is_taken_over(historian: LiveEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "history.safetensors")
    requests = make_requests(4, seed=11)
    historian.greedy(requests, tap=False)
    historian.run(historian.engine.on_workers(Planting.save_history, path))
    historian.run(historian.engine.on_workers(Planting.forget_history))
    assert historian.run(historian.engine.on_workers(Planting.history_size))[0] == 0
    historian.run(historian.engine.on_workers(Planting.load_history, path))
    assert_history_was_right(historian.greedy(requests, tap=False))


def test_rollouts_of_another_engine_are_drafted_from(historian: LiveEngine) -> None:
    requests = make_requests(4, seed=29)
    historian.run(historian.engine.set_num_speculative_tokens(0))
    batch = historian.greedy(requests, tap=False)
    historian.run(historian.engine.on_workers(Planting.forget_history))
    historian.run(historian.engine.add_history(batch.rollouts))
    historian.run(historian.engine.set_num_speculative_tokens(3))
    drafted = historian.greedy(requests, tap=False)
    assert tokens(drafted) == tokens(batch)
    assert_history_was_right(drafted)


def test_each_request_has_a_length_of_its_own(historian: LiveEngine) -> None:
    requests = make_requests(8, seed=37)
    historian.run(historian.engine.set_num_speculative_tokens(None))
    assert historian.run(historian.engine.describe_speculation()) == "k=0 to 3, chosen for each request"
    historian.run(historian.engine.on_workers(Planting.plant, PRICES))
    steps = [
        step
        for _ in range(3)
        for r in historian.generate(requests, tap=False).rollouts
        for step in r.verification_steps
    ]
    assert len({drafted for drafted, _ in steps}) > 1
    assert 1 < sum(drafted for drafted, _ in steps) / len(steps) < 2.9
