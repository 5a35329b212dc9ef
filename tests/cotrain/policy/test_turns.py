"""Trajectories of several turns: what was generated, what was observed, and who may read which of both."""

import random
from dataclasses import replace

import pytest
import torch
from policy_cases import make_learner, token_log_probs

from cotrain.acceptance_stats import acceptance_by_place, counts_by_depth, counts_of, last_segments
from cotrain.policy.batching import micro_batches
from cotrain.records import Rollout, ScoredRollout, Segment, Turn, Versions

OLD, NEW = Versions(0, 0), Versions(1, 0)


def trajectory(generator: random.Random, turns: int = 3, vocab: int = 60) -> Rollout:
    """Turns of 1 to 6 tokens with 1 to 4 observed ones between them; each verification step of a turn emits 1 to 3."""
    tokens, parts, steps, observed = list[int](), list[Turn](), list[tuple[int, int]](), set[int]()
    for turn in range(turns):
        if turn:
            length = generator.randint(1, 4)
            observed |= {*range(len(tokens), len(tokens) + length)}
            tokens += [generator.randrange(vocab) for _ in range(length)]
        start, length, own = len(tokens), generator.randint(1, 6), list[tuple[int, int]]()
        tokens += [generator.randrange(vocab) for _ in range(length)]
        left = length - 1
        while left > 0:
            own.append((2, min(generator.randint(0, 2), left - 1)))
            left -= 1 + own[-1][1]
        parts.append(Turn(start, len(tokens), len(own)))
        steps += own
    log_probs = [0.0 if at in observed else -generator.random() for at in range(len(tokens))]
    earlier = ()
    if turns > 1:  # other weights before the last turn, whose observation belongs to their segment
        earlier = (Segment(OLD, 0, parts[-2].end),)
    return Rollout(
        "p", 0, [1, 2, 3], tokens, log_probs, "", "stop", NEW if earlier else OLD, tuple(steps), earlier, tuple(parts)
    )


@pytest.mark.parametrize("seed", range(50))
def test_the_turns_joined_are_the_trajectory(seed):
    generator = random.Random(seed)
    rollout = trajectory(generator, generator.randint(1, 4))
    turns, read = rollout.turns(), rollout.prompt_token_ids + rollout.token_ids
    assert sum(len(turn.token_ids) for turn in turns) == rollout.num_generated == len(rollout.generated())
    assert [t for turn in turns for t in turn.token_ids] == [rollout.token_ids[at] for at in rollout.generated()]
    assert [step for turn in turns for step in turn.verification_steps] == list(rollout.verification_steps)
    for turn in turns:
        whole = turn.prompt_token_ids + turn.token_ids
        assert whole == read[: len(whole)], "what came before a turn is its prompt, token by token"
        assert turn.segments[0].start == 0 and turn.segments[-1].end == len(turn.token_ids)
        # The first token of a turn has no verification step, and all others have come out of one.
        assert 1 + turn.speculation.num_tokens == len(turn.token_ids)
    assert [turn.versions for turn in turns[:-1]] == [OLD] * (len(turns) - 1) and turns[-1].versions == rollout.versions


def test_a_response_without_turns_is_one():
    rollout = Rollout("p", 0, [1, 2], [3, 4], [-1.0, -2.0], "", "stop", OLD)
    assert rollout.turns() == [rollout] and rollout.num_generated == 2 and rollout.generated() == [0, 1]


def test_counts_of_all_turns_add_up_and_the_last_segment_is_that_of_its_own_turns():
    rollout = trajectory(random.Random(4))
    by_depth = counts_by_depth([rollout])
    assert sum(n for *_, n in by_depth) == rollout.speculation.total()
    last = last_segments([rollout])
    assert len(last) == 1 and last[0].token_ids == rollout.turns()[-1].token_ids
    same = replace(rollout, earlier=(), versions=NEW)
    assert len(last_segments([same])) == 3 and counts_of(last_segments([same])) == rollout.speculation


def test_a_step_deep_in_a_trajectory_counts_at_its_depth():
    observed = 40
    parts = (Turn(0, 3, 1), Turn(3 + observed, 6 + observed, 1))
    rollout = Rollout(
        "p", 0, [1], [5] * (6 + observed), [0.0] * (6 + observed), "", "stop", OLD, ((2, 1), (2, 1)), (), parts
    )
    assert counts_by_depth([rollout]) == [[0, 2, 1, 1], [32, 2, 1, 1]]


def test_acceptance_is_told_by_turn_and_by_the_context_before_it():
    """Two steps of the first turn accept 2 and 0 draft tokens, one of the second, behind 600 observed tokens, accepts 1."""
    parts = (Turn(0, 5, 2), Turn(605, 608, 1))
    rollout = Rollout("p", 0, [1] * 8, [5] * 608, [0.0] * 608, "", "stop", OLD, ((2, 2), (2, 0), (2, 1)), (), parts)
    assert acceptance_by_place([rollout, rollout]) == {"turn_1": 2, "turn_2": 2, "context_0": 2, "context_512": 2}
    steps = ((2, 2), (2, 0), (2, 0))
    assert acceptance_by_place([replace(rollout, verification_steps=steps)])["turn_2"] == 1
    assert acceptance_by_place(rollout.turns()[:1]) == {}


def test_a_micro_batch_has_the_generated_tokens_alone():
    one = Rollout("p", 0, [7, 8], [4, 5, 50, 51, 6], [-0.1, -0.2, 0.0, 0.0, -0.3], "", "stop", NEW, (), (Segment(OLD, 0, 2),),
                  (Turn(0, 2, 0), Turn(4, 5, 0)))  # fmt: skip
    [batch] = micro_batches([ScoredRollout(one, 1.0, 2.0)], 100, torch.device("cpu"))
    assert batch.token_ids.tolist() == [[7, 8, 4, 5, 50, 51]]
    assert batch.predictors.tolist() == [1, 2, 5] and batch.targets.tolist() == [4, 5, 6]
    assert batch.behaviour_log_probs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert batch.versions.tolist() == [0, 0, 1] and batch.lengths.tolist() == [3]
    assert batch.advantages.tolist() == [2.0] * 3 and batch.sequence_ids.tolist() == [0] * 3


def test_observed_tokens_have_no_loss_and_nothing_follows_from_what_is_noted_for_them(tiny_model: str):
    """The update of a trajectory is that of its turns as rollouts of their own, because both read the same tokens before each."""
    generator, rollouts = random.Random(1), list[ScoredRollout]()
    for number in range(8):
        rollout = replace(trajectory(generator), earlier=(), versions=OLD, prompt_id=f"p{number // 2}")
        own = token_log_probs(tiny_model, rollout.prompt_token_ids, rollout.token_ids, 0.8).tolist()
        log_probs = [value if at in rollout.generated() else 0.0 for at, value in enumerate(own)]
        rollouts.append(ScoredRollout(replace(rollout, log_probs=log_probs), 0.0, generator.gauss(0, 1)))
    weights = []
    apart = [ScoredRollout(turn, 0.0, s.advantage) for s in rollouts for turn in s.rollout.turns()]
    lies = [replace(s.rollout, log_probs=[p or -9.0 for p in s.rollout.log_probs]) for s in rollouts]
    for batch in (rollouts, apart, [ScoredRollout(r, 0.0, s.advantage) for r, s in zip(lies, rollouts, strict=True)]):
        learner = make_learner(tiny_model)
        metrics = learner.update(batch)
        weights.append((metrics["policy/loss"], [p.detach().clone() for p in learner._policy.parameters()]))
    for loss, parameters in weights[1:]:
        assert loss == pytest.approx(weights[0][0], rel=1e-4, abs=1e-6)
        for a, b in zip(parameters, weights[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
