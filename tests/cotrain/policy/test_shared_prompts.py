"""Responses to a prompt in one row: the same log-probs and the same update as in rows of their own."""

import random
from typing import Any

import pytest
import torch
from policy_cases import VOCAB, make_learner, token_log_probs
from transformers import AutoModelForCausalLM

from cotrain.models.loading import resolve_model
from cotrain.policy.batching import micro_batches
from cotrain.policy.log_probs import ResponseLogProbs
from cotrain.policy.shared_prompts import can_share, input_tokens, mask_of, positions_and_parts, rows_of
from cotrain.records import Rollout, ScoredRollout, Versions

CPU = torch.device("cpu")


def scored(prompt: list[int], response: list[int], sample: int = 0, advantage: float = 1.0) -> ScoredRollout:
    log_probs = [-1.0] * len(response)
    return ScoredRollout(Rollout("p", sample, prompt, response, log_probs, "", "stop", Versions(0, 0)), 0.0, advantage)


def groups(model: str = "", samples: int = 4, zero: bool = False) -> list[ScoredRollout]:
    """Three prompts of 12 to 20 tokens, and responses of 1 to 5 with the policy's own log-probs."""
    generator, found = random.Random(2), list[ScoredRollout]()
    for number in range(3):
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(12, 20))]
        for sample in range(samples):
            response = [generator.randrange(VOCAB) for _ in range(generator.randint(1, 5))]
            one = scored(prompt, response, sample, 0.0 if zero and not number else generator.gauss(0, 1))
            one.rollout.log_probs[:] = (
                token_log_probs(model, prompt, response, 0.8).tolist() if model else [-1.0] * len(response)
            )
            found.append(one)
    return found


def test_the_worked_example() -> None:
    row = [scored([7, 8], [4, 5, 6]), scored([7, 8], [3, 9])]
    positions, parts = positions_and_parts(row)
    assert positions.tolist() == [0, 1, 2, 3, 2] and parts.tolist() == [0, 0, 1, 1, 2]
    assert mask_of(parts[None])[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]
    ]  # fmt: skip
    long = [scored([7] * 9, [4, 5, 6]), scored([7] * 9, [3, 9]), scored([1, 2, 3], [6])]
    [batch] = micro_batches(long, 100, CPU, shares=True)
    assert batch.token_ids.tolist() == [[7] * 9 + [4, 5, 3], [1, 2, 3] + [0] * 9]
    assert batch.predictors.tolist() == [8, 9, 10, 8, 11, 14] and batch.targets.tolist() == [4, 5, 6, 3, 9, 6]


def test_rows_are_shared_where_that_is_less_work_and_as_far_as_they_fit() -> None:
    short, long = ([scored([7] * 8, [4] * n, i) for i in range(4)] for n in (5, 6))
    assert [len(row) for row in rows_of(short, 1000)] == [4]  # (8 + 4 x 4)^2 = 4 x (8 + 4)^2
    assert [len(row) for row in rows_of(long, 1000)] == [1, 1, 1, 1]
    assert [len(row) for row in rows_of(short, 20)] == [3, 1] and input_tokens(short[:3]) == 20
    other = [scored([9] * 8, [4], 0), *short]
    assert sorted(len(row) for row in rows_of(other, 1000)) == [1, 4], "an equal name is no equal prompt"


@pytest.mark.parametrize("most", [30, 60, 10_000])
def test_log_probs_are_those_of_each_rollout_alone(tiny_model: str, most: int) -> None:
    policy = ResponseLogProbs(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval(), 0.8, torch.float32
    )
    assert can_share(policy)
    rollouts = groups(tiny_model)
    batches = micro_batches(rollouts, most, CPU, shares=True)
    assert sorted(id(one) for batch in batches for one in batch.rollouts) == sorted(map(id, rollouts))
    assert sum(batch.token_ids.numel() for batch in batches) < 0.6 * sum(input_tokens([one]) for one in rollouts)
    for batch in batches:
        assert batch.token_ids.numel() <= most
        log_probs, _ = policy(**batch.inputs)
        torch.testing.assert_close(log_probs, batch.behaviour_log_probs, rtol=1e-5, atol=1e-5)


def test_an_update_is_that_of_rows_of_their_own(tiny_model: str) -> None:
    found = []
    for shares in (True, False):
        learner = make_learner(tiny_model, kl_coefficient=0.1)
        assert learner._shares, "the tiny model can"
        learner._shares = shares
        metrics = learner.update(groups(tiny_model, zero=True))
        found.append((metrics, [parameter.detach().clone() for parameter in learner._policy.parameters()]))
    (shared, weights), (alone, own) = found
    assert shared == pytest.approx(alone, rel=1e-4, abs=1e-6)
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).parameters()
    for one, other, before in zip(
        weights, own, start, strict=True
    ):  # AdamW makes much of the rounding of small gradients
        assert (one - other).norm() < 1e-3 * (one - before).norm()


@pytest.mark.parametrize(
    ("name", "can"),
    [("tiny:llama", True), ("tiny:qwen3_moe", True), ("tiny:qwen3_5", False), ("tiny:gemma3", False)],
)
def test_layers_that_carry_or_see_otherwise_share_nothing(name: str, can: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()
    assert can_share(ResponseLogProbs(model, 1.0, torch.float32)) is can


class IgnoresMasks(ResponseLogProbs):
    """As recurrent layers do, which a model's configuration may not name."""

    def last_hidden(self, token_ids: torch.Tensor, **options: torch.Tensor) -> Any:
        return super().last_hidden(token_ids, **{name: v for name, v in options.items() if name != "attention_mask"})


def test_a_model_that_carries_something_past_the_mask_is_found_by_trying(tiny_model: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for dtype in (torch.float32, torch.bfloat16):
        assert can_share(ResponseLogProbs(model, 1.0, dtype))
        assert not can_share(IgnoresMasks(model, 1.0, dtype))
