"""The short form of `cotrain verify` inside a run: tokens of rollouts that were generated anyway, now and then.

One look, all before the policy moves: `due`, `choose`, the policy learner's laws of what was chosen, `look`. Draft
lengths may have varied and steps are not recorded one by one, so tokens are not sorted by their place in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cotrain.lossless.draws import Draws
from cotrain.lossless.emitted import LOGIT_ERROR, setting_checks
from cotrain.lossless.family import Verdict, alpha_of_look, judge
from cotrain.lossless.monitor_config import MonitorConfig
from cotrain.lossless.setting import describe
from cotrain.records import Rollout
from drafters.base import Sampler

WEIGHT_ROUNDING = 2.0
"""Factor on LOGIT_ERROR in bfloat16: the learner's weights are float32 masters, the engine's are rounded."""


@dataclass(frozen=True)
class Look:
    """What one look found."""

    number: int
    num_tokens: int
    verdict: Verdict

    @property
    def passed(self) -> bool:
        """Nothing speaks against the rollouts."""
        return self.verdict.passed

    def metrics(self) -> dict[str, float]:
        """Numbers of the step's row, as lossless/<name>."""
        return {
            "lossless/look": float(self.number),
            "lossless/tokens": float(self.num_tokens),
            "lossless/passed": float(self.passed),
            "lossless/smallest_adjusted_p": min(row.adjusted_p for row in self.verdict.rows),
            **{
                f"lossless/{row.result.check.replace(' ', '_').replace('-', '_')}_effect": row.result.effect
                for row in self.verdict.rows
            },
        }

    def message(self) -> str:
        """What was found, in one line."""
        if self.passed:
            return f"rollouts have the policy's distribution: {self.num_tokens} tokens, look {self.number}"
        return f"rollouts do not have the policy's distribution: look {self.number}, {self.verdict}"


class LosslessMonitor:
    """Chooses tokens, spreads one false-alarm rate over all looks, and keeps their cost within bounds."""

    def __init__(self, config: MonitorConfig, sampler: Sampler, dtype: str, seed: int):
        """sampler, dtype: the engine's. Draws random numbers of its own, by seed and look."""
        self._config, self._sampler, self._dtype, self._seed = config, sampler, dtype, seed
        self._looks = 0
        self._last_step = 0
        self._spent = self._last_cost = 0.0

    @property
    def logit_tolerance(self) -> float:
        """Largest difference of a logit between engine and learner; what to pass on to `response_draws`."""
        return LOGIT_ERROR[self._dtype] * (WEIGHT_ROUNDING if self._dtype == "bfloat16" else 1.0)

    @property
    def num_looks(self) -> int:
        """Looks so far."""
        return self._looks

    def due(self, step: int, seconds: float) -> bool:
        """Whether to look at this step's rollouts. seconds: since the run started, over all its sessions."""
        if not self._config.enabled:
            return False
        if self._looks == 0:
            return True
        affordable = self._spent + self._last_cost <= self._config.max_share * seconds
        return step - self._last_step >= self._config.every and affordable

    def choose(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Whole rollouts in random order, as many as fit; the last is cut short, the first if it is too long alone.

        What is chosen depends on lengths and on chance, never on the tokens.
        """
        order = np.random.default_rng([self._seed, self._looks]).permutation(len(rollouts))
        left = self._config.tokens
        chosen: list[Rollout] = []
        for index in order:
            rollout = rollouts[index]
            kept = min(len(rollout.token_ids), left - len(rollout.prompt_token_ids))
            if kept < 1 and chosen:
                break
            kept = max(kept, 1)
            chosen.append(replace(rollout, token_ids=rollout.token_ids[:kept], log_probs=rollout.log_probs[:kept]))
            left -= len(rollout.prompt_token_ids) + kept
            if left <= 0:
                break
        return [replace(rollout, verification_steps=()) for rollout in chosen]

    def look(self, step: int, chosen: Sequence[Rollout], draws: Sequence[Draws], seconds: float) -> Look:
        """Judge the chosen rollouts by their laws. seconds: what this look took, the forward pass included."""
        self._looks += 1
        self._last_step = step
        self._last_cost = seconds
        self._spent += seconds
        rng = np.random.default_rng([self._seed, self._looks, 1])
        samplers = [self._sampler] * len(chosen)
        results = setting_checks(chosen, samplers, draws, describe(self._sampler), rng, self.logit_tolerance)
        verdict = judge(results, alpha_of_look(self._config.false_alarm_rate, self._looks))
        return Look(self._looks, sum(map(len, draws)), verdict)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run goes on with the same share of the false-alarm rate."""
        return {
            "looks": self._looks,
            "last_step": self._last_step,
            "spent": self._spent,
            "last_cost": self._last_cost,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._looks, self._last_step = state["looks"], state["last_step"]
        self._spent, self._last_cost = state["spent"], state["last_cost"]
