"""A short form of `cotrain verify` inside a run. It checks tokens of rollouts that were generated anyway (docs/guide/trust.md).

A check takes four calls before the policy is updated: `due`, `choose`, the learner's forward pass over the choice, `check`.
Tokens are not sorted by their place in a verification step, since steps without drafts are not recorded. A token is speculated
if a verification step emitted it: an accepted draft token, or the token that replaces a rejected one or follows the last.

False alarms: the n-th step considered may spend alpha / n(n+1). These shares add up to alpha, so over a run of any
length any false alarm has probability at most alpha = FALSE_ALARM_RATE.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cotrain.config.schema import MonitorConfig
from cotrain.lossless.checks import LOGIT_ERROR, setting_checks
from cotrain.lossless.emitted import Draws
from cotrain.lossless.family import LEAST_SPECULATED, Verdict, judge
from cotrain.lossless.setting import describe
from cotrain.records import Rollout
from drafters.base import SamplingParams

FALSE_ALARM_RATE = 0.01
"""Largest probability that any check of a run raises an alarm although its rollouts are as they should be."""

WEIGHT_ROUNDING = 2.0
"""Factor on LOGIT_ERROR in bfloat16: the learner's weights are float32 masters, the engine's are rounded."""


class Chosen(NamedTuple):
    rollouts: list[Rollout]
    speculated_tokens: int
    """Response tokens of these rollouts that verification steps emitted."""


@dataclass
class _State:
    checks: int = 0
    considered: int = 0
    last_step: int = 0
    spent: float = 0.0
    last_cost: float = 0.0


class LosslessMonitor:
    """Chooses tokens, spreads one false-alarm rate over all checks, and keeps their cost within bounds."""

    def __init__(self, config: MonitorConfig, sampling: SamplingParams, dtype: str, seed: int):
        """sampling, dtype: those of the engine. Random numbers depend only on the seed and the number of steps considered."""
        self._config, self._sampling, self._dtype, self._seed = config, sampling, dtype, seed
        self._state = _State()

    @property
    def logit_tolerance(self) -> float:
        """Largest difference of a logit between engine and learner, to be passed on to `response_draws`."""
        return LOGIT_ERROR[self._dtype] * (WEIGHT_ROUNDING if self._dtype == "bfloat16" else 1.0)

    def due(self, step: int, seconds: float) -> bool:
        """Whether to consider a check of this step. The answer does not depend on the step's rollouts.

        seconds: time since the run started, summed over all its attempts.
        """
        state, every = self._state, self._config.every
        if every == 0 or state.checks == 0:
            return every > 0
        affordable = state.spent + state.last_cost <= self._config.max_share * seconds
        return step - state.last_step >= every and affordable

    def choose(self, rollouts: Sequence[Rollout]) -> Chosen | None:
        """Choose rollouts in random order, as many as fit. The last is cut short; the first keeps at least one response token.

        Returns None if fewer than LEAST_SPECULATED of their tokens were speculated; this step is then not checked. What is
        chosen depends on lengths and on chance, never on the tokens. Whether the check takes place does depend on them, so
        every step considered spends a share of the false-alarm rate.
        """
        order = np.random.default_rng([self._seed, self._state.considered]).permutation(len(rollouts))
        self._state.considered += 1
        left, speculated = self._config.tokens, 0
        chosen: list[Rollout] = []
        for rollout in (rollouts[index] for index in order):
            kept = min(len(rollout.token_ids), left - len(rollout.prompt_token_ids))
            if kept < 1 and chosen:
                break
            kept = max(kept, 1)
            cut = replace(rollout, token_ids=rollout.token_ids[:kept], log_probs=rollout.log_probs[:kept])
            chosen.append(replace(cut, verification_steps=()))
            speculated += speculated_tokens(rollout, kept)
            left -= len(rollout.prompt_token_ids) + kept
            if left <= 0:
                break
        return Chosen(chosen, speculated) if speculated >= LEAST_SPECULATED else None

    def check(
        self, step: int, chosen: Chosen, draws: Sequence[Draws], seconds: float
    ) -> tuple[Verdict, dict[str, float]]:
        """Judge the chosen rollouts by their draws. Also returns the metrics for the step's row, named lossless/<name>.

        seconds: duration of this check, including the forward pass.
        """
        state = self._state
        state.checks, state.last_step, state.last_cost = state.checks + 1, step, seconds
        state.spent += seconds
        rng = np.random.default_rng([self._seed, state.considered, 1])
        samplings = [self._sampling] * len(chosen.rollouts)
        name = describe(self._sampling)
        results = setting_checks(chosen.rollouts, samplings, draws, name, rng, self.logit_tolerance)
        verdict = judge(results, alpha_share(FALSE_ALARM_RATE, state.considered))
        found: dict[str, float] = {"check": state.checks, "tokens": sum(map(len, draws))}
        found |= {"speculated_tokens": chosen.speculated_tokens, "passed": verdict.passed}
        found["smallest_adjusted_p"] = min(r.adjusted_p for r in verdict.results)
        found |= {f"{r.check.replace(' ', '_').replace('-', '_')}_effect": r.effect for r in verdict.results}
        return verdict, {f"lossless/{key}": float(value) for key, value in found.items()}

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed run does not spend the same shares of the false-alarm rate again."""
        return asdict(self._state)

    def load_state(self, state: dict[str, Any]) -> None:
        self._state = _State(**state)


def alpha_share(alpha: float, number: int) -> float:
    """Share of alpha for the number-th (1, 2, ...) step considered; the shares of an endless run add up to alpha."""
    return alpha / (number * (number + 1))


def speculated_tokens(rollout: Rollout, kept: int) -> int:
    """Count how many of the first `kept` response tokens verification steps emitted.

    If a response is cut short, count only those that must have been, wherever its steps without drafts were. If it has such
    steps, and its last step reaches past the end of the response, up to k tokens too many are counted.
    """
    counts, length = rollout.speculation, len(rollout.token_ids)
    if counts is None:
        return 0
    emitted = min(counts.num_drafts + sum(counts.accepted_per_position), length - 1)
    return max(0, emitted - (length - kept))
