"""The short form of `cotrain verify` inside a run: tokens of rollouts that were generated anyway, now and then.

One look, all before the policy moves: `due`, `choose`, the policy learner's laws of what was chosen, `look`. Draft
lengths may have varied and steps without drafts are not recorded, so tokens are not sorted by their place in a step.

A token is speculated when a verification step emitted it: a draft token that was accepted, or what came in place of one
or behind the last. Only these can show that speculation changes the distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cotrain.config.monitor import LEAST_SPECULATED, MonitorConfig
from cotrain.lossless.draws import Draws
from cotrain.lossless.emitted import LOGIT_ERROR, setting_checks
from cotrain.lossless.family import Verdict, alpha_of_look, judge
from cotrain.lossless.setting import describe
from cotrain.records import Rollout
from drafters.base import Sampler

WEIGHT_ROUNDING = 2.0
"""Factor on LOGIT_ERROR in bfloat16: the learner's weights are float32 masters, the engine's are rounded."""


@dataclass(frozen=True)
class Chosen:
    """What a look is taken at."""

    rollouts: list[Rollout]
    speculated_tokens: int
    """Response tokens among these that verification steps emitted."""


@dataclass(frozen=True)
class Look:
    """What one look found."""

    number: int
    num_tokens: int
    speculated_tokens: int
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
            "lossless/speculated_tokens": float(self.speculated_tokens),
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
            seen = f"{self.num_tokens} tokens, {self.speculated_tokens} of them speculated"
            return f"rollouts have the policy's distribution: {seen}, look {self.number}"
        return f"rollouts do not have the policy's distribution: look {self.number}, {self.verdict}"


class LosslessMonitor:
    """Chooses tokens, spreads one false-alarm rate over all looks, and keeps their cost within bounds."""

    def __init__(self, config: MonitorConfig, sampler: Sampler, dtype: str, seed: int):
        """sampler, dtype: the engine's. Draws random numbers of its own, by seed and look."""
        self._config, self._sampler, self._dtype, self._seed = config, sampler, dtype, seed
        self._looks = self._considered = 0
        self._last_step = 0
        self._spent = self._last_cost = 0.0

    @property
    def logit_tolerance(self) -> float:
        """Largest difference of a logit between engine and learner; what to pass on to `response_draws`."""
        return LOGIT_ERROR[self._dtype] * (WEIGHT_ROUNDING if self._dtype == "bfloat16" else 1.0)

    def due(self, step: int, seconds: float) -> bool:
        """Whether to consider a look at this step's rollouts, whatever they are.

        seconds: since the run started, over all its sessions.
        """
        if not self._config.enabled:
            return False
        if self._looks == 0:
            return True
        affordable = self._spent + self._last_cost <= self._config.max_share * seconds
        return step - self._last_step >= self._config.every and affordable

    def choose(self, rollouts: Sequence[Rollout]) -> Chosen | None:
        """Whole rollouts in random order, as many as fit; the last is cut short, the first if it is too long alone.

        None when fewer than LEAST_SPECULATED of their tokens were speculated: then no look takes place in this step.

        What is chosen depends on lengths and on chance, never on the tokens. So rollouts with verification steps are
        not preferred: a response that ends with its first token has none, and ends would be seen too rarely. Whether
        the look takes place does depend on the tokens, since rejections make verification steps. That is why a share
        of the false-alarm rate goes with every step considered, with or without a look.
        """
        order = np.random.default_rng([self._seed, self._considered]).permutation(len(rollouts))
        self._considered += 1
        left, speculated = self._config.tokens, 0
        chosen: list[Rollout] = []
        for index in order:
            rollout = rollouts[index]
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

    def look(self, step: int, chosen: Chosen, draws: Sequence[Draws], seconds: float) -> Look:
        """Judge the chosen rollouts by their laws. seconds: what this look took, the forward pass included."""
        self._looks += 1
        self._last_step = step
        self._last_cost = seconds
        self._spent += seconds
        rng = np.random.default_rng([self._seed, self._considered, 1])
        rollouts, samplers = chosen.rollouts, [self._sampler] * len(chosen.rollouts)
        results = setting_checks(rollouts, samplers, draws, describe(self._sampler), rng, self.logit_tolerance)
        verdict = judge(results, alpha_of_look(self._config.false_alarm_rate, self._considered))
        return Look(self._looks, sum(map(len, draws)), chosen.speculated_tokens, verdict)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run goes on with the same share of the false-alarm rate."""
        return {
            "looks": self._looks,
            "considered": self._considered,
            "last_step": self._last_step,
            "spent": self._spent,
            "last_cost": self._last_cost,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._looks, self._considered, self._last_step = state["looks"], state["considered"], state["last_step"]
        self._spent, self._last_cost = state["spent"], state["last_cost"]


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
