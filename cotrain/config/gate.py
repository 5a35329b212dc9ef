"""Configuration of publish gate, training trigger and canary. Imports no torch.

Lengths and gains are acceptance lengths: mean tokens emitted per verification step.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from drafters.config import Section


class GateConfig(Section):
    """When the drafter trains, when it is published, and when a publication is taken back."""

    publish_when: Literal["gain", "always"] = "gain"
    """gain: only a candidate that beats the served drafter on rollouts neither was trained on, by more than margin and
    by more seconds than a swap costs. always: every candidate, unless its acceptances are not finite."""

    margin: NonNegativeFloat = 0.02
    """Least gain in acceptance length that is published: the lower bound of the gain must be above it."""

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Confidence of the lower bound of the gain, for each candidate. A run that judges N candidates without any gain
    publishes at most (1 - confidence) N of them on average; each costs one swap and serves as well as the one before."""

    min_rollouts: PositiveInt = 16
    """Fewest rollouts a candidate is judged on: those of one step."""

    min_prompts: Annotated[int, Field(ge=2)] = 4
    """Fewest prompts these come from. Rollouts of one prompt resemble each other, so the noise is that of prompts."""

    max_rollouts: PositiveInt = 32
    """Most rollouts of a step that drafters are scored on, spread over its prompts: scoring all of a large step would
    cost a tenth of its time and decide little better."""

    train_when: Literal["always", "every", "drift"] = "every"
    """always: in every step. every: in every drafter.train_every-th step. drift: while training saves more seconds
    than it costs, when acceptance falls, and now and then to find out."""

    drift_gap: NonNegativeFloat = 0.05
    """Acceptance length lost against the best of the last ceiling_steps steps that counts as drift, beyond noise."""

    drift_alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Chance of seeing drift in a step that has none, for each of the two signs of drift."""

    ceiling_steps: Annotated[int, Field(ge=2)] = 20
    """Steps over which the best acceptance length is remembered."""

    gain_lifetime: PositiveInt = 10
    """Steps over which the gain of one training session is counted against its cost."""

    patience: PositiveInt = 3
    """Sessions in a row that may cost more than they save before drift alone no longer starts another."""

    explore_every: PositiveInt = 20
    """Longest pause of training in steps: then one session is tried."""

    canary_steps: PositiveInt = 4
    """Steps after a publication in which the served acceptance length is compared with what the gate expected."""

    canary_alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    """Chance that a publication which keeps its promise is rolled back, over all its canary_steps."""

    canary_tolerance: NonNegativeFloat = 0.05
    """Acceptance length that may be missing from the promise: the policy moves on while the canary watches."""
