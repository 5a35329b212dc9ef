"""Draft lengths on a real engine: lengths that change while requests run, and what is reported."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.config.schema import RolloutConfig, SpeculationConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.engine.worker import EngineWorker
from cotrain.process.scratch import scratch_folder
from cotrain.records import GainReport, RolloutBatch, RolloutRequest
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.base import Drafter
from tests.engine import drafter_calls
from tests.engine.conftest import SERVING, LiveEngine, make_requests, tokens

pytestmark = [pytest.mark.engine, pytest.mark.alone]

K, MAX_BATCH = 3, 16


@pytest.fixture(scope="module")
def adaptive(
    rollout_config: RolloutConfig, target_folder: Path, drafter_folder: Path, fitted_drafter: Drafter
) -> Iterator[LiveEngine]:
    """An engine with a drafter worth serving, whose draft lengths may be chosen."""
    worker = {"worker_extension_cls": f"{drafter_calls.__name__}.CountingWorker"}
    config = rollout_config.model_copy(
        update={"speculation": SpeculationConfig(), "num_speculative_tokens": K, "vllm": rollout_config.vllm | worker}
    )
    with scratch_folder("test-speculation") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), str(drafter_folder), SERVING, 0, str(scratch)))
        live.send_drafter(fitted_drafter.state_for_serving())
        yield live
        live.stop()


def fix(live: LiveEngine, num_speculative_tokens: int | None) -> None:
    live.run(live.engine.set_num_speculative_tokens(num_speculative_tokens))
    live.run(live.engine.reset_prefix_cache())


def draft_lengths(live: LiveEngine, *by_batch: int) -> None:
    """Choose them by batch size from 1 on, the last one for all above."""
    table = [by_batch[min(batch, len(by_batch)) - 1] for batch in range(1, MAX_BATCH + 1)]
    live.run(live.engine.in_scheduler(DraftLengths.__setattr__, "_chosen", table))
    live.run(live.engine.in_scheduler(DraftLengths.__setattr__, "_fixed", None))


def drafted(batch: RolloutBatch) -> list[list[int]]:
    """Draft tokens of each rollout's verification steps that had any."""
    return [[num for num, _ in rollout.verification_steps] for rollout in batch.rollouts]


async def at_once(live: LiveEngine, groups: list[tuple[list[RolloutRequest], int | None]]) -> list[RolloutBatch]:
    """Greedy, each group with its limit of tokens; all requests begin in the same engine step."""
    vllm, calls = live.engine._engine, []
    await vllm.pause_generation(mode="keep", clear_cache=False)
    for requests, limit in groups:
        limits = {} if limit is None else {"max_tokens": limit}
        call = live.engine.generate(requests, tap=False, temperature=0.0, seed=None, **limits)
        calls.append(asyncio.create_task(call))
    num = sum(len(requests) for requests, _ in groups)
    while vllm.output_processor.get_num_unfinished_requests() < num:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)  # the last one is on its way to the engine core, which takes it before it resumes
    await vllm.resume_generation()
    return await asyncio.gather(*calls)


def greedy_texts(live: LiveEngine, num_speculative_tokens: int, **options: Any) -> list[list[int]]:
    fix(live, num_speculative_tokens)
    return tokens(live.greedy(make_requests(8), tap=False, **options))


# ---------------------------------------------------------------------------------------------------------------
# Draft lengths that change
# ---------------------------------------------------------------------------------------------------------------


def test_the_draft_length_follows_the_batch_as_it_drains(adaptive: LiveEngine) -> None:
    """8 requests draft nothing, the 3 longest of them one token, and the longest 3."""
    requests = make_requests(8)
    plain = {limit: greedy_texts(adaptive, 0, max_tokens=limit) for limit in (12, 28, 48)}
    adaptive.run(adaptive.engine.reset_prefix_cache())
    draft_lengths(adaptive, 3, 1, 1, 1, 0)

    groups = [(requests[:5], 12), (requests[5:7], 28), (requests[7:], 48)]
    batches = adaptive.run(at_once(adaptive, groups))
    first, second, last = (drafted(batch) for batch in batches)
    assert first == [[]] * 5
    assert all(lengths and set(lengths) == {1} for lengths in second)
    assert last[0][0] == 1 and K in last[0]
    expected = plain[12][:5] + plain[28][5:7] + plain[48][7:]
    assert [text for batch in batches for text in tokens(batch)] == expected


def test_greedy_text_is_the_same_whatever_the_draft_length_does(adaptive: LiveEngine) -> None:
    plain = greedy_texts(adaptive, 0)
    assert greedy_texts(adaptive, K) == plain
    fix(adaptive, K)

    async def generate_and_change() -> RolloutBatch:
        task = asyncio.create_task(adaptive.engine.generate(make_requests(8), tap=False, temperature=0.0, seed=None))
        changes = 0
        while not task.done():
            await adaptive.engine.set_num_speculative_tokens((0, 3, 1, 2)[changes % 4])
            await asyncio.sleep(0.02)
            changes += 1
        return await task

    batch = adaptive.run(generate_and_change())
    assert tokens(batch) == plain
    assert len({num for lengths in drafted(batch) for num in lengths}) >= 2


def test_log_probs_are_those_of_the_law_whatever_the_draft_length_does(adaptive: LiveEngine, target_model: Any) -> None:
    fix(adaptive, K)

    async def generate_and_change() -> RolloutBatch:
        task = asyncio.create_task(adaptive.engine.generate(make_requests(8), tap=False))
        while not task.done():
            for num_speculative_tokens in (0, 2, 3):
                await adaptive.engine.set_num_speculative_tokens(num_speculative_tokens)
                await asyncio.sleep(0.02)
        return await task

    for rollout in adaptive.run(generate_and_change()).rollouts:
        row = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
        start = len(rollout.prompt_token_ids)
        with torch.no_grad():
            logits = target_model(row).logits[0, start - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, row[0, start:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.log_probs), expected, atol=1e-3, rtol=0)


# ---------------------------------------------------------------------------------------------------------------
# Off
# ---------------------------------------------------------------------------------------------------------------


def gain_of(live: LiveEngine) -> GainReport | None:
    """What speculation gained since the last call."""
    gain: GainReport | None = live.run(live.engine.take_window()).gain
    return gain


def steps_of(live: LiveEngine) -> tuple[RolloutBatch, list[list[int]]]:
    """A batch of four, and of each of its engine steps: does it compute prompts, and how often did the drafter run?"""
    live.run(live.engine.on_workers(drafter_calls.Counting.take_steps))
    return live.generate(make_requests(4), tap=False), live.run(
        live.engine.on_workers(drafter_calls.Counting.take_steps)
    )


def test_at_a_fixed_0_the_drafter_never_runs(adaptive: LiveEngine) -> None:
    fix(adaptive, 1)
    assert sum(calls for _, calls in steps_of(adaptive)[1]) >= 24, "the drafter is counted"
    fix(adaptive, 0)
    batch, steps = steps_of(adaptive)
    assert not batch.speculation
    assert gain_of(adaptive) is None
    assert len(steps) >= 48 and not any(calls for _, calls in steps)


def test_where_speculation_may_come_back_the_drafter_reads_prompts_and_nothing_else(adaptive: LiveEngine) -> None:
    fix(adaptive, 0)
    adaptive.run(adaptive.engine.on_workers(EngineWorker.read_prompts, True))
    batch, steps = steps_of(adaptive)
    assert not batch.speculation
    assert {prompts for prompts, _ in steps} == {0, 1}
    assert all((calls > 0) == bool(prompts) for prompts, calls in steps)


def accepted_at(live: LiveEngine, first: int, undrafted: int) -> list[dict[int, int]]:
    """Ten long responses, each beside one of 20 tokens, give accepted draft tokens by response tokens so far.

    undrafted: tokens of the long response before its first draft.
    """
    found = []
    for number in range(first, first + 10):
        long, short = make_requests(2, seed=number)
        pair = [long, replace(short, max_new_tokens=20)]
        live.run(live.engine.reset_prefix_cache())
        at, accepted = undrafted, {}
        for drafted, taken in live.run(at_once(live, [(pair, None)]))[0].rollouts[0].verification_steps:
            if drafted == K:
                accepted[at] = taken
            at += taken + 1
        found.append(accepted)
    return found


def share_equal(found: list[dict[int, int]], reference: list[dict[int, int]]) -> tuple[float, int]:
    """Share of the places drafted at in both runs that have as many accepted tokens, and the number of places."""
    both = [a[at] == b[at] for a, b in zip(found, reference, strict=True) for at in a.keys() & b.keys()]
    return sum(both) / len(both), len(both)


def test_a_drafter_switched_on_in_mid_request_knows_what_came_before(adaptive: LiveEngine) -> None:
    """It accepts as much, place for place, as one that was on all the time; without what it missed it does not."""
    on_workers = adaptive.engine.on_workers
    adaptive.run(adaptive.engine.clear_drafter_cache())
    draft_lengths(adaptive, K)
    reference = accepted_at(adaptive, 50, undrafted=1)
    adaptive.run(adaptive.engine.clear_drafter_cache())
    draft_lengths(adaptive, K, 0)
    adaptive.run(on_workers(EngineWorker.read_prompts, True))
    share, number = share_equal(accepted_at(adaptive, 50, undrafted=21), reference)
    adaptive.run(adaptive.engine.clear_drafter_cache())
    adaptive.run(on_workers(EngineWorker.read_prompts, False))
    share_without, _ = share_equal(accepted_at(adaptive, 50, undrafted=21), reference)
    assert number >= 20
    assert share > 0.95
    assert share_without < share - 0.1


# ---------------------------------------------------------------------------------------------------------------
# The choice
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(adaptive: LiveEngine) -> LiveEngine:
    """The engine after its steps told what draft lengths cost."""
    adaptive.run(adaptive.engine.set_num_speculative_tokens(None))
    adaptive.run(adaptive.engine.take_window())
    for first in range(0, 64, 8):
        adaptive.generate(make_requests(8, first=first), tap=False)
    return adaptive


def test_the_first_steps_are_spread_over_all_draft_lengths(learnt: LiveEngine) -> None:
    steps = learnt.run(learnt.engine.take_window()).steps
    # At any batch size, since a block of steps can fall on the end of a call, when requests finish.
    tried = Counter[int]()
    for step in steps:
        tried[step.num_speculative_tokens] += step.num_steps * (step.kind != "prompts")
    assert all(tried[length] >= 3 for length in range(K + 1)), tried
    words = learnt.run(learnt.engine.describe_speculation())
    assert "fixed" not in words and ("gain" in words or "off" in words)


def test_the_gain_of_a_step_is_reported(learnt: LiveEngine) -> None:
    live = learnt
    live.run(live.engine.set_num_speculative_tokens(None))
    live.generate(make_requests(8), tap=False)
    gain_of(live)
    batch = live.generate(make_requests(8, first=100), tap=False)
    gain, steps = live.run(live.engine.take_window())
    assert sum(step.num_tokens for step in steps) >= batch.num_generated_tokens
    assert {step.kind for step in steps} >= {"prompts", "steady"} and max(step.batch for step in steps) <= 8
    decoding = [step for step in steps if step.kind != "prompts"]
    assert sum(step.seconds for step in decoding) == pytest.approx(gain.seconds)
    assert 0 < sum(step.seconds for step in steps) < 1.05 * batch.seconds
    assert gain is not None
    assert 0.2 < gain.speedup_vs_no_speculation < 5.0 and sum(step.num_steps for step in decoding) >= 48 / (K + 1) - 1
    assert 0 < gain.seconds < 1.5 * batch.seconds
    assert 0 <= gain.longest_draft <= K
    assert (gain.longest_draft > 0) == bool(batch.speculation)


def test_nothing_is_reported_of_text_with_another_sampling_or_a_fixed_length(
    learnt: LiveEngine,
) -> None:
    live = learnt
    live.run(live.engine.set_num_speculative_tokens(None))
    gain_of(live)
    live.greedy(make_requests(4), tap=False)
    gain = gain_of(live)
    assert gain is not None and gain.seconds == 0.0
    fix(live, 2)
    live.generate(make_requests(4), tap=False)
    assert gain_of(live) is None


def test_greedy_text_is_the_same_with_chosen_draft_lengths(learnt: LiveEngine) -> None:
    live = learnt
    plain = greedy_texts(live, 0)
    fix(live, None)
    assert tokens(live.greedy(make_requests(8), tap=False)) == plain


def test_a_new_drafter_comes_with_what_is_expected_of_it(learnt: LiveEngine, fitted_drafter: Drafter) -> None:
    live = learnt
    fix(live, None)
    state, version = fitted_drafter.state_for_serving(), live.engine.versions.drafter + 1
    live.run(live.engine.update_drafter(live.payload(state), version, [0.0] * K))
    assert "off" in live.run(live.engine.describe_speculation())
    live.run(live.engine.update_drafter(live.payload(state), version + 1, [1.0] * K))
    assert live.run(live.engine.describe_speculation()).startswith("k=")


# ---------------------------------------------------------------------------------------------------------------
# Updates that are checked first, and undone
# ---------------------------------------------------------------------------------------------------------------


def test_an_update_can_be_checked_and_undone(
    adaptive: LiveEngine, fitted_drafter: Drafter, untrained_drafter: Drafter
) -> None:
    good, other = fitted_drafter.state_for_serving(), untrained_drafter.state_for_serving()
    adaptive.send_drafter(good)
    version = adaptive.engine.versions
    served = {name: digest(tensor) for name, tensor in good.items()}

    def serves() -> dict[str, str]:
        return adaptive.run(adaptive.engine.served_digests(list(good), draft=True))

    adaptive.run(adaptive.engine.check_drafter(adaptive.payload(other)))
    assert serves() == served and adaptive.engine.versions == version
    broken = other | {"norm.weight": other["norm.weight"] * float("nan")}
    with pytest.raises(WeightUpdateRefused, match="non-finite"):
        adaptive.run(adaptive.engine.check_drafter(adaptive.payload(broken)))
    adaptive.send_drafter(other)
    assert serves() != served
    adaptive.run(adaptive.engine.undo_drafter_update())
    assert serves() == served and adaptive.engine.versions == version
