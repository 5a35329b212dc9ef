"""Drafting from history on the real engine, alone and beside EAGLE-3: what it leaves as it is, and what it accepts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.acceptance_stats import drafter_counts, drafter_starts, total_counts
from cotrain.config.schema import HistoryConfig, RolloutConfig, SpeculationConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.speculation.draft_length import DraftLengths, Step
from cotrain.loop.windows import merge
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutBatch
from cotrain.transport.features import read_shard
from drafters.base import Drafter
from tests.engine.conftest import SERVING, LiveEngine, make_requests, tokens
from tests.engine.planted_drafts import FAULTS, LENGTHS, OF_ANOTHER_REQUEST, PRICES, Planting
from tests.engine.test_sampling import NUM_SAMPLES, Laws, laws, p_values, samples  # noqa: F401

pytestmark = pytest.mark.engine

PLANTING = "tests.engine.planted_drafts.PlantingWorker"
PROPOSERS = (pytest.param("alone", marks=pytest.mark.long), "mixed")


@pytest.fixture(scope="module", params=PROPOSERS)
def historian(
    request: Any, rollout_config: RolloutConfig, target_folder: Path, drafter_folder: Path, fitted_drafter: Drafter
) -> Iterator[LiveEngine]:
    """An engine that drafts from what it has generated."""
    changes = {"prompts_per_step": 256, "synchronous_batches": True, "speculation": SpeculationConfig()}
    changes |= {"history": HistoryConfig(max_bytes=2**22)}
    config = rollout_config.model_copy(update=changes)
    vllm = config.vllm | {"worker_extension_cls": PLANTING, "max_num_seqs": 32}
    config = config.model_copy(update={"vllm": vllm})
    drafter = (str(drafter_folder), SERVING) if request.param == "mixed" else (None, None)
    with scratch_folder("test-suffix") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), *drafter, 0, str(scratch)))
        if request.param == "mixed":
            live.send_drafter(fitted_drafter.state_for_serving())
        yield live
        live.stop()


@pytest.fixture(autouse=True)
def as_at_the_start(historian: LiveEngine, fitted_drafter: Drafter) -> None:
    """Each test begins with an empty history, three draft tokens, the fitted drafter and no fault, whatever ran before."""
    if historian.engine.spec.drafter_folder is not None:
        historian.send_drafter(fitted_drafter.state_for_serving())
    historian.run(historian.engine.on_workers(Planting.plant, None))
    historian.run(historian.engine.on_workers(Planting.forget_history))
    historian.run(historian.engine.set_num_speculative_tokens(3))
    counts(historian)


def counts(live: LiveEngine) -> dict[str, int]:
    return live.run(live.engine.on_workers(Planting.take_history_report))["counts"]


def assert_history_was_right(live: LiveEngine) -> None:
    """Nearly all draft tokens of the history were accepted since the last report, and there were some."""
    found = counts(live)
    assert found["history/accepted_tokens"] > 0.9 * found["history/drafted_tokens"] > 50


def test_greedy_text_is_that_of_no_speculation_with_and_without_a_history(historian: LiveEngine) -> None:
    requests = make_requests(12, seed=11)
    historian.run(historian.engine.set_num_speculative_tokens(0))
    plain = tokens(historian.greedy(requests, tap=False))
    counts(historian)
    for k in (3, 1, 3):
        historian.run(historian.engine.set_num_speculative_tokens(k))
        batch = historian.greedy(requests, tap=False)
        assert tokens(batch) == plain
    assert_history_was_right(historian)  # the same texts have been generated before
    historian.run(historian.engine.on_workers(Planting.plant, LENGTHS))
    assert tokens(historian.greedy(requests, tap=False)) == plain
    historian.run(historian.engine.on_workers(Planting.plant, None))
    found = counts(historian)
    assert found["history/accepted_tokens"] > 0.9 * found["history/drafted_tokens"] > 50


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

    counts(historian)
    batch = historian.run(generate_and_swap())
    assert tokens(batch) == plain and any(len(rollout.segments) > 1 for rollout in batch.rollouts)
    assert_history_was_right(historian)


def test_text_has_the_targets_law_and_so_have_the_laws_that_are_handed_over(
    historian: LiveEngine,
    laws: Laws,  # noqa: F811
) -> None:
    samples(historian, number=512, temperature=1.0)
    counts(historian)
    historian.run(historian.engine.on_workers(Planting.plant, LENGTHS))
    sampled, speculation = samples(historian, seeded=False, temperature=1.0)
    historian.run(historian.engine.on_workers(Planting.plant, None))
    by_proposer = counts(historian)
    assert speculation.accepted_per_position[1] > NUM_SAMPLES / 50
    assert by_proposer["history/accepted_tokens"] > NUM_SAMPLES / 50
    if historian.engine.spec.drafter_folder is not None:
        assert by_proposer["drafter/accepted_tokens"] > NUM_SAMPLES / 50
    drafted, accepted = (
        sum(number for name, number in by_proposer.items() if name.endswith(kind))
        for kind in ("/drafted_tokens", "/accepted_tokens")
    )
    assert (drafted, accepted) == (speculation.num_draft_tokens, sum(speculation.accepted_per_position))
    assert min(p_values(laws, sampled, 1.0, -1)) > 1e-4


@pytest.mark.parametrize(
    ("historian", "fault"),
    [
        *(pytest.param("alone", fault, marks=[] if fault == "anticipates" else pytest.mark.long) for fault in FAULTS),
        ("mixed", OF_ANOTHER_REQUEST),
    ],
    indirect=["historian"],
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
    counts(historian)
    assert historian.run(historian.engine.on_workers(Planting.take_history_report))["state"]["history/tokens"] == 0
    historian.run(historian.engine.on_workers(Planting.load_history, path))
    historian.greedy(requests, tap=False)
    assert_history_was_right(historian)


def test_rollouts_of_another_engine_are_drafted_from(historian: LiveEngine) -> None:
    requests = make_requests(4, seed=29)
    historian.run(historian.engine.set_num_speculative_tokens(0))
    batch = historian.greedy(requests, tap=False)
    historian.run(historian.engine.on_workers(Planting.forget_history))
    historian.run(historian.engine.add_history(batch.rollouts))
    historian.run(historian.engine.set_num_speculative_tokens(3))
    counts(historian)
    assert tokens(historian.greedy(requests, tap=False)) == tokens(batch)
    assert_history_was_right(historian)


@pytest.mark.parametrize("historian", ["mixed"], indirect=True)
def test_a_new_drafter_is_chosen_as_soon_as_more_is_expected_of_it(
    historian: LiveEngine, untrained_drafter: Drafter, fitted_drafter: Drafter
) -> None:
    """What the drafter before it had accepted says nothing of the new one."""
    requests = make_requests(16, seed=31)
    historian.send_drafter(untrained_drafter.state_for_serving())
    historian.generate(requests, tap=False)
    counts(historian)
    historian.generate(requests, tap=False)
    assert counts(historian)["history/drafts"] > 100, "an untrained drafter is no match for an index"
    payload = historian.payload(fitted_drafter.state_for_serving())
    version = historian.engine.versions.drafter + 1
    historian.run(historian.engine.update_drafter(payload, version, [0.99, 0.98, 0.97]))
    historian.generate(requests[:1], tap=False)
    found = counts(historian)
    assert found["drafter/drafts"] > 0.7 * (found["drafter/drafts"] + found.get("history/drafts", 0))


@pytest.mark.parametrize("historian", ["mixed"], indirect=True)
def test_rollouts_and_their_features_say_which_drafts_are_the_drafters(
    historian: LiveEngine, fitted_drafter: Drafter, untrained_drafter: Drafter
) -> None:
    """In two batches: much is expected of the drafter in the first one, and in the second one the index has the texts."""
    requests, batches = make_requests(16, seed=31), []
    for drafter, rates in ((fitted_drafter, [0.99, 0.98, 0.97]), (untrained_drafter, [0.1, 0.01, 0.001])):
        payload, version = historian.payload(drafter.state_for_serving()), historian.engine.versions.drafter + 1
        historian.run(historian.engine.update_drafter(payload, version, rates))
        batches.append(historian.generate(requests))
    batch = merge(batches)
    found, own = counts(historian), total_counts(map(drafter_counts, batch.rollouts))
    assert own is not None and batch.speculation is not None
    assert (own.num_drafts, own.num_draft_tokens) == (found["drafter/drafts"], found["drafter/drafted_tokens"])
    assert batch.speculation.num_drafts - own.num_drafts == found["history/drafts"] > 0 < own.num_drafts
    assert sum(own.accepted_per_position) == found["drafter/accepted_tokens"]
    starts = [(r.prompt_token_ids + r.token_ids, drafter_starts(r)) for r in batch.rollouts]
    records = [record for shard in batch.features for record in read_shard(shard)]
    assert records and any(record.drafted for record in records)
    for record in records:
        assert (record.token_ids.tolist(), [tuple(step) for step in record.drafted or ()]) in starts


@pytest.mark.parametrize("historian", ["mixed"], indirect=True)
def test_the_scheduler_knows_of_steps_in_which_the_drafter_did_not_run(historian: LiveEngine) -> None:
    """Such steps have prices of their own: see test_speculation.py."""
    requests, engine = make_requests(8, seed=41), historian.engine
    historian.run(engine.set_num_speculative_tokens(None))
    historian.greedy(requests, tap=False)
    historian.run(engine.on_workers(Planting.plant, LENGTHS))

    async def steps_of_repeated_text() -> set[bool]:
        task, seen = asyncio.create_task(engine.generate(requests, tap=False, temperature=0.0, seed=None)), set()
        while not task.done():
            step = await engine.in_scheduler(DraftLengths.__getattribute__, "_before")
            seen |= {Step(*step).has_passes} if step else set()
        await task
        return seen

    assert historian.run(steps_of_repeated_text()) == {True, False}


@pytest.mark.parametrize("historian", ["mixed"], indirect=True)
def test_where_history_proposes_each_request_has_a_length_of_its_own(
    historian: LiveEngine, untrained_drafter: Drafter
) -> None:
    requests = make_requests(8, seed=37)
    historian.send_drafter(untrained_drafter.state_for_serving())
    historian.run(historian.engine.set_num_speculative_tokens(None))
    assert historian.run(historian.engine.describe_speculation()) == "k=0 to 3, chosen for each request"
    historian.run(historian.engine.on_workers(Planting.plant, PRICES))
    counts(historian)
    for _ in range(3):
        historian.generate(requests, tap=False)
    found = counts(historian)
    assert 1 < found["history/drafted_tokens"] / found["history/drafts"] < 2.9
