"""Settings of the drafter's training, whether the engines belong to a run or to a host. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain.config.schema import DrafterConfig, RunConfig
from cotrain.records import ScoredRollout

MAX_ROLLOUTS = 32
"""Most rollouts of a step that drafters are scored on, spread over its prompts: scoring all of a large step would cost
a tenth of its time and decide little better."""

SPARE = 1.5  # rollouts tapped for each one needed: how many are is random, and some have no hidden states to train on


@dataclass(frozen=True)
class TrainerSpec:
    drafter: DrafterConfig
    serving_dtype: str  # number format of the engines, in which drafters are published: "float32" or "bfloat16"
    num_speculative_tokens: int  # most draft tokens in a verification step of the engines
    num_positions: int | None
    """Positions that the drafter must reach: the engines' longest text and the draft tokens after it. None if unknown."""
    total_updates: int  # optimizer steps in all, which sets the length of a cosine schedule
    seed: int
    max_buffer_bytes: int  # most bytes of features that are held for training
    max_policy_lag: int  # how many policy versions features may be older than the newest head that the trainer has


def trainer_spec(config: RunConfig) -> TrainerSpec:
    """Return a run's trainer settings. The buffer has room for what the engines may tap in drafter.buffer.max_age + 1 steps."""
    drafter, rollout = config.drafter, config.rollout
    assert drafter is not None
    return TrainerSpec(
        drafter=drafter,
        serving_dtype=rollout.dtype,
        num_speculative_tokens=rollout.num_speculative_tokens,
        num_positions=rollout.positions(drafter.model.type),
        total_updates=config.steps // drafter.train_every * drafter.updates_per_step,
        seed=config.seed,
        max_buffer_bytes=(drafter.buffer.max_age + 1) * rollout.num_engines * rollout.features.max_bytes,
        max_policy_lag=config.stream.max_policy_lag,
    )


def tap_share(config: RunConfig, last: Sequence[ScoredRollout]) -> float:
    """Return the share of a step's rollouts that a round trains on or that drafters are judged by. last: the step before.

    The steps since the round before share in a round, as far as drafter.buffer.max_age lets them. In the first step all
    rollouts are tapped: their lengths are not known, and a new drafter's vocabulary is chosen from them.
    """
    drafter = config.drafter
    assert drafter is not None
    if not last:
        return 1.0
    tokens = sum(len(one.rollout.prompt_token_ids) + len(one.rollout.token_ids) for one in last)
    of_round = drafter.updates_per_step * drafter.batch_tokens if drafter.train else 0
    trained = of_round / min(drafter.train_every, drafter.buffer.max_age + 1) * len(last) / tokens
    return min(1.0, SPARE * max(MAX_ROLLOUTS, trained) / config.rollout.rollouts_per_step)
