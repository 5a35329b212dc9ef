"""How well a drafter does on rollouts, in numbers. This imports no torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RolloutAcceptance:
    """What each of R rollouts adds to the expected acceptance length. NaN for a rollout with a hole.

    The rates of any subset of rollouts are accepted.sum(0) / steps.sum() over it, so resampling needs no forward pass.
    """

    steps: NDArray[np.float64]  # [R] expected verification steps
    accepted: NDArray[np.float64]  # [R, k] expected steps that accept draft position j and all before it
    known: NDArray[np.int64]  # [R] acceptances that are not NaN; equal for two drafters on the same rollouts

    def joined(self, other: "RolloutAcceptance") -> "RolloutAcceptance":
        """Return the rows of both."""
        steps = np.concatenate([self.steps, other.steps])
        accepted = np.concatenate([self.accepted, other.accepted])
        return RolloutAcceptance(steps, accepted, np.concatenate([self.known, other.known]))

    def rates(self) -> list[float]:
        """Return, for each draft position, the share of verification steps that accept it and all before it, as in vLLM.

        Rollouts with a hole are left out; empty when no rollout is left. Unbiased over rollouts sampled from the target.
        """
        whole = np.isfinite(self.steps)
        return (self.accepted[whole].sum(0) / self.steps[whole].sum()).tolist() if whole.any() else []
