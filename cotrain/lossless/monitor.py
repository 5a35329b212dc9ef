"""The short form of `cotrain verify` inside a run: checks tokens of rollouts that were generated anyway (docs/trust.md).

A check takes four calls, all before the policy moves: `due`, `choose`, the policy learner's laws of what was chosen, `check`.
Tokens are not sorted by their place in a verification step, since steps without drafts are not recorded. A token is speculated
when a verification step emitted it: a draft token that was accepted, or what came in place of one or behind the last.

False alarms: the n-th step that is considered spends alpha / n(n+1). These shares add up to alpha, so over a run of any
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
"""Chance that any check of a run raises an alarm although its rollouts are as they should be."""

WEIGHT_ROUNDING = 2.0
"""Factor on LOGIT_ERROR in bfloat16: the learner's weights are float32 masters, the engine's are rounded."""


class Chosen(NamedTuple):
    rollouts: list[Rollout]
    speculated_tokens: int
    """Response tokens among these that verification steps emitted."""


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
        """sampling, dtype: the engine's. Draws random numbers of its own, by seed and step considered."""
        self._config, self._sampling, self._dtype, self._seed = config, sampling, dtype, seed
        self._state = _State()

    @property
    def logit_tolerance(self) -> float:
        """Largest difference of a logit between engine and learner; what to pass on to `response_draws`."""
        return LOGIT_ERROR[self._dtype] * (WEIGHT_ROUNDING if self._dtype == "bfloat16" else 1.0)

    def due(self, step: int, seconds: float) -> bool:
        """Whether to consider a check of this step's rollouts, whatever they are.

        seconds: since the run started, over all its attempts.
        """
        state, every = self._state, self._config.every
        if every == 0 or state.checks == 0:
            return every > 0
        affordable = state.spent + state.last_cost <= self._config.max_share * seconds
        return step - state.last_step >= every and affordable

    def choose(self, rollouts: Sequence[Rollout]) -> Chosen | None:
        """Whole rollouts in random order, as many as fit; the last is cut short, the first if it is too long alone.

        None when fewer than LEAST_SPECULATED of their tokens were speculated: then this step is not checked. What is
        chosen depends on lengths and on chance, never on the tokens; whether the check takes place does depend on them,
        so that a share of the false-alarm rate goes with every step considered.
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
        """Judge the chosen rollouts by their laws, and give the numbers of the step's row, as lossless/<name>.

        seconds: what this check took, the forward pass included.
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
        """For a checkpoint: a resumed run goes on with the same share of the false-alarm rate."""
        return asdict(self._state)

    def load_state(self, state: dict[str, Any]) -> None:
        self._state = _State(**state)


def alpha_share(alpha: float, number: int) -> float:
    """Share of alpha for the number-th (1, 2, ...) step considered; those of an endless run add up to alpha."""
    return alpha / (number * (number + 1))


def speculated_tokens(rollout: Rollout, kept: int) -> int:
    """How many of the first `kept` response tokens verification steps emitted.

    Where a response is cut short, those that must have been, wherever its steps without drafts were. Where steps
    without drafts are mixed with a last step that reaches past the end of the response, up to k too many are counted.
    """
    counts, length = rollout.speculation, len(rollout.token_ids)
    if counts is None:
        return 0
    emitted = min(counts.num_drafts + sum(counts.accepted_per_position), length - 1)
    return max(0, emitted - (length - kept))
