"""A short form of `cotrain verify` inside a run. It checks tokens of rollouts that were generated anyway (docs/guide/trust.md).

Tokens are not sorted by their place in a verification step, since steps without drafts are not recorded. A token is speculated
if a verification step emitted it: an accepted draft token, or the token that replaces a rejected one or follows the last.

False alarms: the n-th step considered may spend alpha / n(n+1). These shares add up to alpha, so over a run of any
length any false alarm has probability at most alpha = FALSE_ALARM_RATE.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cotrain.config.schema import MonitorConfig
from cotrain.lossless.checks import LOGIT_ERROR, setting_checks
from cotrain.lossless.emitted import Draws
from cotrain.lossless.family import LEAST_SPECULATED, Verdict, judge
from cotrain.lossless.setting import describe
from cotrain.records import Rollout
from drafters.base import SamplingParams

FALSE_ALARM_RATE = 0.01  # largest probability that a run has any alarm although its rollouts are as they should be
LOGIT_TOLERANCE = LOGIT_ERROR | {"bfloat16": 2 * LOGIT_ERROR["bfloat16"]}
"""Largest difference of a logit between engine and learner, whose weights are float32, while the engine's are rounded."""


@dataclass
class _State:
    checks: int = 0
    considered: int = 0
    last_step: int = 0
    spent: float = 0.0
    last_cost: float = 0.0


class LosslessMonitor:
    """Chooses tokens, spreads one false-alarm rate over all checks, and bounds their cost."""

    def __init__(
        self,
        config: MonitorConfig,
        sampling: SamplingParams,
        dtype: str,
        seed: int,
        saved: dict[str, Any] | None = None,
    ):
        """sampling, dtype: those of the engine. Random numbers depend only on the seed and the number of steps considered.

        saved: what `state` returned, so that a resumed run does not spend the same shares of the false-alarm rate again.
        """
        self._config, self._sampling, self._seed = config, sampling, seed
        self._state = _State(**(saved or {}))
        self.logit_tolerance = LOGIT_TOLERANCE[dtype]  # to be passed on to `response_draws`

    def check(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        run_seconds: float,
        forward: Callable[[list[Rollout]], Sequence[Draws]],
    ) -> tuple[Verdict, dict[str, float]] | None:
        """Check some of a step's rollouts, before the policy is updated. Returns None if no check is due, or too little was speculated.

        run_seconds: time since the run started, summed over all its attempts. forward: the learner's forward pass over the
        rollouts that are checked. Also returns the metrics for the step's row, named lossless/<name>.
        """
        if not rollouts or not self._is_due(step, run_seconds):
            return None
        started, state = time.perf_counter(), self._state
        chosen, speculated = self._choose(rollouts)
        if speculated < LEAST_SPECULATED:
            return None
        draws = forward(chosen)
        rng = np.random.default_rng([self._seed, state.considered, 1])
        samplings = [self._sampling] * len(chosen)
        results = setting_checks(chosen, samplings, draws, describe(self._sampling), rng, self.logit_tolerance)
        verdict = judge(results, alpha_share(FALSE_ALARM_RATE, state.considered))
        state.checks, state.last_step, state.last_cost = state.checks + 1, step, time.perf_counter() - started
        state.spent += state.last_cost
        metrics = {
            "check": state.checks,
            "tokens": sum(map(len, draws)),
            "speculated_tokens": speculated,
            "passed": verdict.passed,
            "smallest_adjusted_p": min(result.adjusted_p for result in verdict.results),
        }
        metrics |= {f"{r.check.replace(' ', '_').replace('-', '_')}_effect": r.effect for r in verdict.results}
        return verdict, {f"lossless/{name}": float(value) for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        return asdict(self._state)

    def _is_due(self, step: int, run_seconds: float) -> bool:
        """Return whether to consider a check of this step. The answer does not depend on the step's rollouts."""
        state, every = self._state, self._config.every
        if every == 0 or state.checks == 0:
            return every > 0
        affordable = state.spent + state.last_cost <= self._config.max_share * run_seconds
        return step - state.last_step >= every and affordable

    def _choose(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], int]:
        """Choose rollouts in random order, as many as fit, and count their speculated tokens. The last is cut short; the first
        has at least one response token.

        What is chosen depends on lengths and on chance, never on the tokens. Whether the check takes place does depend on
        them, so every step considered spends a share of the false-alarm rate.
        """
        order = np.random.default_rng([self._seed, self._state.considered]).permutation(len(rollouts))
        self._state.considered += 1
        left, speculated = self._config.tokens, 0
        chosen: list[Rollout] = []
        for rollout in (rollouts[index] for index in order):
            length = min(len(rollout.token_ids), left - len(rollout.prompt_token_ids))
            if length < 1 and chosen:
                break
            length = max(length, 1)
            tokens, log_probs = rollout.token_ids[:length], rollout.log_probs[:length]
            chosen.append(replace(rollout, token_ids=tokens, log_probs=log_probs, verification_steps=()))
            speculated += speculated_tokens(rollout, length)
            left -= len(rollout.prompt_token_ids) + length
        return chosen, speculated


def alpha_share(alpha: float, number: int) -> float:
    """Share of alpha for the number-th (1, 2, ...) step considered; the shares of an endless run add up to alpha."""
    return alpha / (number * (number + 1))


def speculated_tokens(rollout: Rollout, length: int) -> int:
    """Count how many of the first `length` response tokens verification steps emitted.

    If a response is cut short, count only those that must have been, wherever its steps without drafts were. If it has such
    steps, and its last step reaches past the end of the response, up to k tokens too many are counted.
    """
    whole = len(rollout.token_ids)
    emitted = min(rollout.speculation.num_tokens, whole - 1)
    return max(0, emitted - (whole - length))
