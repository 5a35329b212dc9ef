"""Checks that a run makes of its own rollouts: hidden states and log-probs at its start, and their distribution all along."""

from dataclasses import replace

from cotrain.acceptance_stats import last_segments
from cotrain.config.schema import RunConfig
from cotrain.loop.roles import Roles
from cotrain.loop.step import Clock
from cotrain.lossless.emitted import Draws
from cotrain.lossless.monitor import LosslessMonitor
from cotrain.publish.alarms import Alarm
from cotrain.records import Rollout, RolloutBatch, ScoredRollout
from cotrain.run.checkpoint import RunState
from cotrain.run.console import Console
from cotrain.trainer.self_check import check_features, check_log_probs, check_records
from drafters.base import SamplingParams
from drafters.files import end_token_ids


class Checks:
    """What was checked so far, and the monitor of the distribution."""

    def __init__(self, config: RunConfig, roles: Roles, console: Console, start: RunState):
        rollout = config.rollout
        self._config, self._roles, self._console, self._first_step = config, roles, console, start.step + 1
        self._sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)
        self.monitor = LosslessMonitor(config.lossless, self._sampling, rollout.dtype, config.seed, start.lossless)
        self._features_checked = False

    def features(self, batch: RolloutBatch, policy_version: int, clock: Clock) -> None:
        """Check what the engines handed over, in the first step with rollouts of the learner's own policy version."""
        if self._features_checked or not batch.rollouts:
            return
        rollout, nodes = self._config.rollout, self._roles.nodes
        with clock.phase("self_check"):
            coming = [nodes.begin_bring(shard, nodes.local) for shard in batch.features]
            here = replace(batch, features=[nodes.arrived(shard) for shard in coming])
            forward = self._roles.policy.hidden_states
            error = check_features(here, forward, rollout.dtype, policy_version)
            check_records(here, () if rollout.ignore_eos else end_token_ids(nodes.model_path))
            nodes.remove_all(set(here.features).difference(batch.features))
        if error is not None:
            self._features_checked = True
            self._console.say(f"tapped hidden states are the policy's own (relative error {error:.1g})")

    def log_probs(self, step: int, metrics: dict[str, float], lag_max: float) -> None:
        """Check the first step or, with lag, each step's tokens from the newest policy. metrics: those of the policy's update."""
        rollout = self._config.rollout
        gap = metrics.get("policy/rollout_log_prob_gap")
        if self._config.stream.max_policy_lag:
            gap = metrics.get("policy/rollout_log_prob_gap_lag_0") if lag_max else gap
        elif step != self._first_step or lag_max:
            return
        if gap is not None and rollout.top_p == 1 and rollout.top_k == 0:
            check_log_probs(gap, rollout.dtype)

    def distribution(
        self, step: int, scored: list[ScoredRollout], policy_version: int, run_seconds: float, clock: Clock
    ) -> tuple[list[Alarm], dict[str, float]]:
        """Check, when due, that the tokens that the learner's current policy generated have its distribution.

        It checks whole last segments of the step's rollouts. A step takes its groups by number: among rollouts that happen to
        have ended first, short ones would be seen too often. Returns alarms, and the metrics of a check.
        """

        def forward(chosen: list[Rollout]) -> list[Draws]:
            with clock.phase("lossless"):
                return self._roles.policy.response_draws(chosen, self._sampling, self.monitor.logit_tolerance)

        tails = last_segments(one.rollout for one in scored)
        current = [rollout for rollout in tails if rollout.versions.policy == policy_version]
        checked = self.monitor.check(step, current, run_seconds, forward)
        if checked is None:
            return [], {}
        verdict, metrics = checked
        if verdict.passed:
            return [], metrics
        return [Alarm("not_lossless", f"rollouts do not have the policy's distribution: {verdict}", metrics)], metrics
