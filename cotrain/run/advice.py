"""Advice on the balance of a run with lag, from the metrics of its steps. Pure."""

from collections import deque
from collections.abc import Mapping

STARVED_STEPS, STARVED_SHARE = 20, 0.5
"""The learner is starved when, on average over this many steps, it was idle for more than this share of a step."""

DRIFT_STEPS, MOST_CAPPED, LEAST_ESS = 5, 0.2, 0.3
"""The behaviour policy has drifted away when, for DRIFT_STEPS steps in a row, more than MOST_CAPPED of the tokens were capped
or masked, or the effective sample size was below LEAST_ESS. These values are first guesses, based on few runs."""


class Advice:
    """Gives advice based on the last steps. Each advice is given once, and again only if its reason has gone and come back."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=STARVED_STEPS)
        self._drifting = 0
        self._given: set[str] = set()

    def look(self, row: Mapping[str, float], max_policy_lag: int) -> list[str]:
        """Take in the metrics of a step. Returns the advice that is new, as lines of text."""
        self._idle.append(row.get("idle/policy", 0.0))
        limited = row.get("policy/behaviour_capped", 0.0)
        drifts = limited > MOST_CAPPED or row.get("policy/behaviour_ess", 1.0) < LEAST_ESS
        self._drifting = self._drifting + 1 if drifts else 0
        idle = sum(self._idle) / len(self._idle)
        found = {}
        if len(self._idle) == STARVED_STEPS and idle > STARVED_SHARE:
            found["starved"] = (
                f"the learner was idle for {idle:.0%} of the last {STARVED_STEPS} steps: more engines "
                f"(rollout.num_engines) or stream.max_policy_lag = {max_policy_lag + 1} would keep it busy"
            )
        if self._drifting >= DRIFT_STEPS:
            found["behaviour_drift"] = (
                f"for {self._drifting} steps the rollouts have been far from the policy that trains on them "
                f"({limited:.0%} of the tokens limited): lower stream.max_policy_lag or policy.optimizer.learning_rate"
            )
        new = [f"{name}: {text}" for name, text in found.items() if name not in self._given]
        self._given = set(found)
        return new
