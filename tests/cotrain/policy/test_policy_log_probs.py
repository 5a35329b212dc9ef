import random

import pytest
import torch
from policy_cases import VOCAB, make_rollouts, token_log_probs
from transformers import AutoModelForCausalLM

import cotrain.policy.log_probs as log_probs_module
from cotrain.policy.batching import micro_batches, share_of_rank, split_minibatches
from cotrain.policy.log_probs import HeadLogProbs, ResponseLogProbs
from cotrain.policy.shared_prompts import input_tokens
from cotrain.records import Rollout, ScoredRollout, Versions

CPU = torch.device("cpu")


def test_head_equals_autograd_for_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(11, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator)
    targets = torch.randint(VOCAB, (11,), generator=generator)
    incoming = torch.randn(11, generator=generator)

    plain = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    distribution = (plain[0] @ plain[1].T / 0.7).log_softmax(-1)
    expected = distribution[range(11), targets]
    expected.backward(incoming)
    expected_entropy = -(distribution.exp() * distribution).sum(-1).detach()

    for chunk_rows in (1, 4, 100):
        monkeypatch.setattr(log_probs_module, "CHUNK_LOGITS", chunk_rows * VOCAB)
        own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        log_probs, entropy = HeadLogProbs.apply(*own, targets, 0.7, torch.float32)
        log_probs.backward(incoming)
        torch.testing.assert_close(log_probs, expected)
        torch.testing.assert_close(entropy, expected_entropy)
        for one, other in zip(own, plain, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("micro_batch_tokens", [24, 70, 10_000])
def test_batched_log_probs_equal_those_of_each_rollout_alone(tiny_model: str, micro_batch_tokens: int) -> None:
    rollouts = make_rollouts(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    policy = ResponseLogProbs(model, 0.8, torch.float32)
    batches = micro_batches(rollouts, micro_batch_tokens, CPU)

    assert sorted(id(scored) for batch in batches for scored in batch.rollouts) == sorted(map(id, rollouts))
    for batch in batches:
        assert batch.token_ids.numel() <= micro_batch_tokens
        log_probs, _ = policy(batch.token_ids, batch.predictors, batch.targets)
        alone = [
            token_log_probs(tiny_model, scored.rollout.prompt_token_ids, scored.rollout.token_ids, 0.8)
            for scored in batch.rollouts
        ]
        torch.testing.assert_close(log_probs, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bound", [20, 50, 200])
def test_no_micro_batch_has_more_positions_than_it_may(bound: int) -> None:
    """Padding included. Only a rollout that is longer by itself does."""
    lengths = random.Random(0).choices(range(3, 40), k=60)
    rollouts = [
        ScoredRollout(Rollout("p", i, [1, 2], [3] * n, [-1.0] * n, "", "stop", Versions(0, 0)), 0.0, 1.0)
        for i, n in enumerate(lengths)
    ]
    batches = micro_batches(rollouts, bound, CPU)
    assert sum(len(batch.rollouts) for batch in batches) == len(rollouts)
    for batch in batches:
        assert batch.token_ids.numel() <= bound or len(batch.rollouts) == 1
    full = sum(batch.token_ids.numel() for batch in batches) / (bound * len(batches))
    assert full > 0.5  # they are not small either


def test_minibatches_and_shares_hold_every_rollout_once(tiny_model: str) -> None:
    rollouts = make_rollouts(tiny_model)[:11]
    minibatches = split_minibatches(rollouts, 3)
    assert [scored for minibatch in minibatches for scored in minibatch] == rollouts
    shares = [share_of_rank(rollouts, rank, 2) for rank in range(2)]
    assert sorted(id(scored) for share in shares for scored in share) == sorted(map(id, rollouts))
    first, second = (sum(input_tokens([scored]) for scored in share) for share in shares)
    assert abs(first - second) <= max(input_tokens([scored]) for scored in rollouts)
