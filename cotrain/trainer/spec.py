"""Settings of the drafter's training, whether the engines belong to a run or to a host. Imports no torch."""

from dataclasses import dataclass

from cotrain.config.schema import DrafterConfig, RunConfig


@dataclass(frozen=True)
class TrainerSpec:
    """Settings of a DrafterTrainer."""

    drafter: DrafterConfig
    serving_dtype: str  # number format of the engines, in which drafters are published: "float32" or "bfloat16"
    num_speculative_tokens: int  # most draft tokens in a verification step of the engines
    num_positions: int | None
    """Positions that the drafter must reach: the engines' longest text and the draft tokens after it. None if unknown."""
    total_updates: int  # optimizer steps in all, which sets the length of a cosine schedule
    seed: int
    max_buffer_bytes: int  # most bytes of features that are held for training
    max_policy_lag: int
    """How many policy versions features may be older than the newest head that the trainer was given."""


def trainer_spec(config: RunConfig) -> TrainerSpec:
    """Return a run's trainer settings. The buffer has room for what the engines may tap in drafter.buffer.max_age + 1 steps."""
    drafter, rollout = config.drafter, config.rollout
    assert drafter is not None
    return TrainerSpec(
        drafter=drafter,
        serving_dtype=rollout.dtype,
        num_speculative_tokens=rollout.num_speculative_tokens,
        num_positions=rollout.num_positions,
        total_updates=config.steps // drafter.train_every * drafter.updates_per_step,
        seed=config.seed,
        max_buffer_bytes=(drafter.buffer.max_age + 1) * rollout.num_engines * rollout.features.max_bytes,
        max_policy_lag=config.stream.max_policy_lag,
    )
