"""A real engine whose weights change while it generates: who generated each token, whose hidden states were tapped."""

import asyncio
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cotrain.acceptance_stats import counts_of, last_segment
from cotrain.records import Rollout, RolloutBatch
from cotrain.trainer.self_check import relative_error
from cotrain.transport.features import FeatureRecord, read_shard
from drafters.base import Drafter
from tests.engine.conftest import AUX_LAYERS, LiveEngine, make_requests, tokens

pytestmark = pytest.mark.engine

NUM_REQUESTS, LENGTH = 8, 240
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(target_model: Any, moved_target_state: State) -> list[Any]:
    """The policies that take turns: that of even versions and that of odd ones."""
    moved = copy.deepcopy(target_model)
    moved.load_state_dict(moved_target_state, strict=False)
    return [target_model, moved]


def swap_while_generating(
    live: LiveEngine, states: list[State], drafters: list[State], **sampling: Any
) -> tuple[RolloutBatch, int]:
    """Policies take turns, and so do drafters, until the rollouts are finished. Returns them and the number of swaps."""
    policies = [live.payload(state) for state in states]
    payloads = [live.payload(state) for state in drafters]

    async def run() -> tuple[RolloutBatch, int]:
        engine, swaps = live.engine, 0
        task = asyncio.create_task(engine.generate(make_requests(NUM_REQUESTS), max_tokens=LENGTH, **sampling))
        while not task.done():
            await asyncio.sleep(0.2)
            version = engine.versions.policy + 1
            await engine.update_policy(policies[version % 2], version)
            await engine.update_drafter(payloads[swaps % 2], engine.versions.drafter + 1)
            swaps += 1
        return await task, swaps

    return live.run(run())


def log_probs_of(rollout: Rollout, models: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-prob of each response token under its segment's policy, and the likeliest token there.

    Both are computed in float64, since the rounding of a float32 forward moves single log-probs by up to 7e-5.
    """
    text = torch.tensor([rollout.prompt_token_ids + rollout.token_ids])
    first = len(rollout.prompt_token_ids) - 1
    with torch.no_grad():
        laws = [copy.deepcopy(model).double()(text).logits[0, first:-1].log_softmax(-1) for model in models]
    parts = [laws[s.versions.policy % 2][s.start : s.end] for s in rollout.segments]
    law = torch.cat(parts)
    return law.gather(1, text[0, first + 1 :, None]).squeeze(1), law.argmax(-1)


def check_log_probs(rollout: Rollout, own: torch.Tensor) -> None:
    """Compare a rollout's log-probs with those of its policies, `own`.

    With the other policy, 99.9 % of the tokens differ by more than 1e-3. Rounding moves none of 10^5 by more than 5e-5, but
    one token was once off by 2e-4, for a reason that is not known. A stale row of the KV cache would move all that follow it.
    """
    error = (own - torch.tensor(rollout.log_probs)).abs()
    outliers = {int(i): float(error[i]) for i in (error > 1e-4).nonzero().flatten()}
    assert len(outliers) <= 1 and error.max() < 1e-3, (outliers, rollout.segments)


def records_of(batch: RolloutBatch) -> list[FeatureRecord]:
    return [record for shard in batch.features for record in read_shard(shard)]


def check_segments(batch: RolloutBatch, first_version: int) -> None:
    for rollout in batch.rollouts:
        bounds = [(s.start, s.end) for s in rollout.segments]
        assert bounds[0][0] == 0 and bounds[-1][1] == len(rollout.token_ids) == LENGTH
        assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
        policies = [s.versions.policy for s in rollout.segments]
        assert policies == sorted(policies) and policies[0] >= first_version


def check_features(record: FeatureRecord, model: Any) -> float:
    """Largest relative error of a record's rows against a forward of the policy."""
    keep = record.feature_mask
    with torch.no_grad():
        states = model(record.token_ids[None], output_hidden_states=True).hidden_states
    aux = torch.cat([states[layer][0] for layer in AUX_LAYERS], -1)
    return max(
        relative_error(record.aux_hidden[keep], aux[keep]),
        relative_error(record.final_hidden[keep], states[-1][0][keep]),
    )


@pytest.fixture
def swapped(
    fresh: LiveEngine, fitted_drafter: Drafter, untrained_drafter: Drafter, target_state: State,
    moved_target_state: State,
) -> Callable[..., tuple[RolloutBatch, int]]:  # fmt: skip
    """Generate while both change; the first policy and a fitted drafter come first."""

    def run(**sampling: Any) -> tuple[RolloutBatch, int]:
        if fresh.engine.versions.policy % 2 == 0:
            fresh.send_policy(moved_target_state)
        fresh.send_policy(target_state)
        fresh.send_drafter(fitted_drafter.state_for_serving())
        drafters = [untrained_drafter.state_for_serving(), fitted_drafter.state_for_serving()]
        return swap_while_generating(fresh, [target_state, moved_target_state], drafters, **sampling)

    return run


def test_every_token_is_stamped_with_the_policy_that_generated_it(
    fresh: LiveEngine, swapped: Callable[..., tuple[RolloutBatch, int]], models: list[Any]
) -> None:
    """Computed anew at a swap: tokens and log-probs before and after it are the old policy's and the new one's."""
    greedy, swaps = swapped(temperature=0.0, seed=None)
    assert swaps >= 3
    sampled, _ = swapped()
    for batch in (greedy, sampled):
        check_segments(batch, 0)
        assert sum(len({s.versions.policy for s in r.segments}) > 1 for r in batch.rollouts) == NUM_REQUESTS
        for rollout in batch.rollouts:
            own, likeliest = log_probs_of(rollout, models)
            if batch is greedy:
                assert likeliest.tolist() == rollout.token_ids
            else:
                check_log_probs(rollout, own)
                # Stamps that are off by one would show.
                shifted = rollout.segments[0].end
                other, _ = log_probs_of(rollout, models[::-1])
                assert (other - torch.tensor(rollout.log_probs)).abs()[max(0, shifted - 4) : shifted + 4].max() > 1e-3


def test_verification_steps_add_up_to_the_tokens_by_which_last_segments_are_counted(
    swapped: Callable[..., tuple[RolloutBatch, int]],
) -> None:
    """The first token has no step, and neither has the first one after a policy update."""
    batch, _ = swapped()
    for rollout in batch.rollouts:
        updates = len({segment.versions.policy for segment in rollout.segments}) - 1
        emitted = 1 + updates + sum(1 + accepted for _, accepted in rollout.verification_steps)
        assert 0 <= emitted - LENGTH <= rollout.verification_steps[-1][1]
        assert last_segment(rollout).drafted_throughout
    assert counts_of(batch.rollouts) == batch.speculation


def test_hidden_states_are_those_of_the_last_policy(
    swapped: Callable[..., tuple[RolloutBatch, int]], models: list[Any]
) -> None:
    batch, _ = swapped()
    records = records_of(batch)
    assert len(records) == NUM_REQUESTS
    for record, rollout in zip(records, batch.rollouts, strict=True):
        assert record.policy_version == rollout.versions.policy
        assert record.earlier_tokens == rollout.segments[-1].start
        assert record.feature_mask.float().mean() > 0.9
        assert check_features(record, models[record.policy_version % 2]) < 1e-4


def test_calls_overlap_and_each_gets_its_own(fresh: LiveEngine, fitted_drafter: Drafter, target_model: Any) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    groups = [make_requests(4, seed=seed, first=10 * seed) for seed in range(4)]
    alone = [tokens(fresh.greedy(group)) for group in groups]

    async def together() -> list[RolloutBatch]:
        engine = fresh.engine
        return await asyncio.gather(*(engine.generate(group, temperature=0.0, seed=None) for group in groups))

    batches = fresh.run(together())
    assert [tokens(batch) for batch in batches] == alone
    for batch in batches:
        records = records_of(batch)
        assert [r.token_ids.tolist() for r in records] == [r.prompt_token_ids + r.token_ids for r in batch.rollouts]
        assert batch.feature_stats["num_holes"] == 0
        assert batch.speculation == counts_of(batch.rollouts)
    assert fresh.engine._admission.tapped == {}
