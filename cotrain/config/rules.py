"""Rules between the fields of a configuration, each naming the field and the fix. Imports no torch.

A rule is a function from a section to the problems it finds. All rules of a section are checked before it is refused,
so that a user reads every problem at once; load_config turns them into its list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic_core import PydanticCustomError

from cotrain.config.lossless_guard import engine_problems

if TYPE_CHECKING:
    from cotrain.config.optimizer import OptimizerConfig
    from cotrain.config.schema import PolicyConfig, RolloutConfig, RunConfig

BROKEN_RULES = "broken_rules"
"""Type of the pydantic error; its context holds `problems`."""

OWNED_VLLM_ARGUMENTS = {
    "model": "set policy.model",
    "tokenizer": "set policy.model",
    "dtype": "set rollout.dtype",
    "seed": "set seed",
    "max_model_len": "set rollout.max_prompt_tokens and rollout.max_new_tokens",
    "speculative_config": "set [drafter] and rollout.draft_tokens / rollout.draft_sample_method",
    "worker_extension_cls": "cotrain's own extension carries the weight transfer and the feature tap",
    "weight_transfer_config": "cotrain's transactional backend is always used",
    "logprobs_mode": "the learner needs log-probs of the sampling distribution",
    "scheduler_cls": "cotrain's scheduler sets the draft length at run time",
    "async_scheduling": "the draft length is read by a synchronous scheduler",
    "disable_log_stats": "acceptance metrics need vLLM's statistics",
    "per_request_spec_decode_metrics": "acceptance is counted by draft length, which needs every verification step",
    "tensor_parallel_size": "the read-back checksum covers unsharded engines; add replicas with rollout.num_engines",
}
"""vLLM arguments that cotrain sets itself, and what to do instead."""


class Problem(NamedTuple):
    """What is wrong with a field, and how to mend it."""

    field: str
    """Dotted path below the section."""
    message: str


SectionT = TypeVar("SectionT")
Rule = Callable[[Any], Iterator[Problem]]


def check(section: SectionT, rules: Sequence[Rule]) -> SectionT:
    """The section as it is. Raises an error that pydantic collects, with every problem the rules find."""
    problems = [problem for rule in rules for problem in rule(section)]
    if problems:
        text = "; ".join(f"{field}: {message}" for field, message in problems)
        raise PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "problems": problems})
    return section


def betas_are_decay_rates(optimizer: OptimizerConfig) -> Iterator[Problem]:
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Problem("betas", f"both must be at least 0 and below 1, got {list(optimizer.betas)}")


def model_is_named(policy: PolicyConfig) -> Iterator[Problem]:
    if not policy.model.strip():
        yield Problem("model", "is empty; give a model folder, a hub id, or bundled:smollm2-135m-instruct")


def clip_low_leaves_the_ratio_positive(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.clip_low >= 1:
        yield Problem("clip_low", f"must be below 1 (the ratio is clipped at 1 - clip_low), got {policy.clip_low:g}")


def clip_high_is_not_below_clip_low(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.clip_high < policy.clip_low < 1:
        yield Problem(
            "clip_high",
            f"{policy.clip_high:g} is below clip_low {policy.clip_low:g}; use the same value, or a larger one to clip "
            "higher",
        )


def a_correction_has_what_it_corrects(policy: PolicyConfig) -> Iterator[Problem]:
    correction = policy.behaviour_correction
    if correction == "none":
        return
    if policy.old_log_probs != "recomputed":
        yield Problem(
            "behaviour_correction",
            f"'{correction}' corrects the learner's own log-probs; set policy.old_log_probs = \"recomputed\", or leave "
            "behaviour_correction out, since the importance ratio is to the engine's already",
        )
    if policy.importance_ratio == "sequence":
        yield Problem(
            "importance_ratio",
            f'"sequence" does not go with policy.behaviour_correction = "{correction}", which weighs single tokens; '
            'set importance_ratio = "token", or behaviour_correction = "none"',
        )


def behaviour_bounds_are_used(policy: PolicyConfig) -> Iterator[Problem]:
    correction = policy.behaviour_correction
    for name, users in (("behaviour_cap", ("truncate", "mask")), ("behaviour_floor", ("mask",))):
        value = getattr(policy, name)
        if value != type(policy).model_fields[name].default and correction not in users:
            yield Problem(
                name,
                f'{value:g} has no effect with policy.behaviour_correction = "{correction}"; set that to '
                f'"{users[-1]}", or leave {name} out',
            )


def vllm_arguments_are_not_cotrains(rollout: RolloutConfig) -> Iterator[Problem]:
    for key in rollout.vllm:
        if key in OWNED_VLLM_ARGUMENTS:
            yield Problem(f"vllm.{key}", f"is set by cotrain: {OWNED_VLLM_ARGUMENTS[key]}")


def stop_strings_are_not_empty(rollout: RolloutConfig) -> Iterator[Problem]:
    if "" in rollout.stop:
        yield Problem("stop", "holds an empty string, which would end every response at once; take it out")


def a_whole_rollout_fits_the_tap(rollout: RolloutConfig) -> Iterator[Problem]:
    bound = rollout.features.max_tokens_per_step
    if bound < rollout.max_model_len:
        yield Problem(
            "features.max_tokens_per_step",
            f"{bound} is less than one rollout of full length (max_prompt_tokens + max_new_tokens = "
            f"{rollout.max_model_len}); raise it to at least that",
        )


def name_is_a_folder_name(run: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.name):
        yield Problem("name", f"{run.name!r} is no folder name; use letters, digits, '.', '_' and '-'")


def samples_of_a_prompt_differ(run: RunConfig) -> Iterator[Problem]:
    # Both choices of policy.advantage compare the samples of one prompt with each other.
    if run.rollout.temperature == 0:
        yield Problem(
            "rollout.temperature",
            f"0 makes all samples of a prompt equal, so policy.advantage={run.policy.advantage} is 0 everywhere; "
            "set it above 0, for example 1.0",
        )
    if run.rollout.samples_per_prompt == 1:
        yield Problem(
            "rollout.samples_per_prompt",
            f"1 leaves policy.advantage={run.policy.advantage} nothing to compare a sample with; set it to 2 or more",
        )


def truncated_sampling_recomputes_log_probs(run: RunConfig) -> Iterator[Problem]:
    rollout = run.rollout
    if run.policy.old_log_probs == "rollout" and (rollout.top_p < 1 or rollout.top_k > 0):
        yield Problem(
            "policy.old_log_probs",
            f"'rollout' does not go with truncated sampling (top_p={rollout.top_p:g}, top_k={rollout.top_k}), whose "
            'log-probs are not the policy\'s; set it to "recomputed", or top_p = 1 and top_k = 0',
        )


def corrected_log_probs_are_of_one_law(run: RunConfig) -> Iterator[Problem]:
    rollout, correction = run.rollout, run.policy.behaviour_correction
    if correction != "none" and (rollout.top_p < 1 or rollout.top_k > 0):
        yield Problem(
            "policy.behaviour_correction",
            f"'{correction}' does not go with truncated sampling (top_p={rollout.top_p:g}, top_k={rollout.top_k}): the "
            "engine's log-probs are then of another law than the learner's; set it to \"none\", or top_p = 1 and "
            "top_k = 0",
        )


def rollouts_divide_evenly(run: RunConfig) -> Iterator[Problem]:
    rollouts, parts = run.rollout.rollouts_per_step, run.policy.minibatches * run.policy.num_processes
    if rollouts % parts:
        yield Problem(
            "rollout.prompts_per_step",
            f"{run.rollout.prompts_per_step} prompts x {run.rollout.samples_per_prompt} samples "
            f"(rollout.samples_per_prompt) = {rollouts} rollouts cannot be divided by policy.minibatches x "
            f"policy.num_processes = {run.policy.minibatches} x {run.policy.num_processes}; change one of the four",
        )


def a_whole_rollout_fits_a_micro_batch(run: RunConfig) -> Iterator[Problem]:
    if run.policy.micro_batch_tokens < run.rollout.max_model_len:
        yield Problem(
            "policy.micro_batch_tokens",
            f"{run.policy.micro_batch_tokens} is less than one rollout of full length (rollout.max_prompt_tokens + "
            f"rollout.max_new_tokens = {run.rollout.max_model_len}); raise it to at least that",
        )


def served_depth_is_trained(run: RunConfig) -> Iterator[Problem]:
    if run.drafter is None or run.rollout.allow_draft_beyond_trained_depth:
        return
    served, trained = run.rollout.draft_tokens, run.drafter.model.trained_depth
    if served > trained:
        yield Problem(
            "rollout.draft_tokens",
            f"{served} is above drafter.model.trained_depth = {trained}; raise trained_depth, or set "
            "rollout.allow_draft_beyond_trained_depth = true",
        )


def window_covers_the_unroll(run: RunConfig) -> Iterator[Problem]:
    window = run.rollout.features.window
    if run.drafter is not None and window is not None and window <= run.drafter.model.trained_depth:
        yield Problem(
            "rollout.features.window",
            f"{window} positions leave nothing to train {run.drafter.model.trained_depth} draft positions on "
            "(drafter.model.trained_depth); make it larger, or leave it out to keep all",
        )


def depth_decay_is_used(run: RunConfig) -> Iterator[Problem]:
    if run.drafter is None or run.drafter.objective.depth_weights == "decay":
        return
    if run.drafter.objective.depth_decay != type(run.drafter.objective)().depth_decay:
        yield Problem(
            "drafter.objective.depth_decay",
            f"{run.drafter.objective.depth_decay:g} has no effect with depth_weights = "
            f'"{run.drafter.objective.depth_weights}"; set drafter.objective.depth_weights = "decay", or leave it out',
        )


def vllm_arguments_are_lossless(run: RunConfig) -> Iterator[Problem]:
    if run.drafter is None:
        return
    arguments = {key: value for key, value in run.rollout.vllm.items() if key not in OWNED_VLLM_ARGUMENTS}
    for key, message in engine_problems(arguments):
        yield Problem(f"rollout.vllm.{key}", message)


def the_gate_has_rollouts_to_judge_on(run: RunConfig) -> Iterator[Problem]:
    # A single sample, and a window that leaves nothing to train on, are refused by rules of their own.
    if run.drafter is None or not run.drafter.train or run.drafter.gate.publish_when == "always":
        return
    gate, rollout = run.drafter.gate, run.rollout
    way_on = "lower it" if gate.min_prompts > 2 else 'set drafter.gate.publish_when = "always"'
    if rollout.prompts_per_step < gate.min_prompts:
        yield Problem(
            "drafter.gate.min_prompts",
            f"{gate.min_prompts}, but a step has {rollout.prompts_per_step} prompts (rollout.prompts_per_step) to score "
            f"a drafter on; raise those, or {way_on}",
        )
    if rollout.rollouts_per_step < gate.min_rollouts and rollout.samples_per_prompt > 1:
        yield Problem(
            "drafter.gate.min_rollouts",
            f"{gate.min_rollouts}, but a step has {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} "
            f"samples = {rollout.rollouts_per_step} rollouts to score a drafter on; lower it, or raise "
            "rollout.prompts_per_step",
        )
    window, depth = rollout.features.window, run.drafter.model.trained_depth
    if window is not None and window > depth:
        yield Problem(
            "rollout.features.window",
            f"{window} positions of a rollout are too few to expect an acceptance length of it, which "
            'drafter.gate decides by; leave it out to keep all, or set drafter.gate.publish_when = "always"',
        )


def train_every_is_used(run: RunConfig) -> Iterator[Problem]:
    drafter = run.drafter
    if drafter is not None and drafter.gate.train_when != "every" and drafter.train_every != 1:
        yield Problem(
            "drafter.train_every",
            f'{drafter.train_every} has no effect with drafter.gate.train_when = "{drafter.gate.train_when}"; set that '
            'to "every", or leave train_every out',
        )


def the_lag_limit_allows_the_cadence(run: RunConfig) -> Iterator[Problem]:
    drafter = run.drafter
    if drafter is None or drafter.alarms.max_lag_versions is None or not run.policy.train:
        return
    longest = drafter.train_every * drafter.publish_every
    if drafter.alarms.max_lag_versions < longest:
        yield Problem(
            "drafter.alarms.max_lag_versions",
            f"{drafter.alarms.max_lag_versions} would stop a healthy run: with drafter.train_every x "
            f"drafter.publish_every = {drafter.train_every} x {drafter.publish_every} a drafter serves {longest} policy "
            "versions; raise it to at least that",
        )


OPTIMIZER = (betas_are_decay_rates,)
POLICY = (
    model_is_named,
    clip_low_leaves_the_ratio_positive,
    clip_high_is_not_below_clip_low,
    a_correction_has_what_it_corrects,
    behaviour_bounds_are_used,
)
ROLLOUT = (vllm_arguments_are_not_cotrains, stop_strings_are_not_empty, a_whole_rollout_fits_the_tap)
RUN = (
    name_is_a_folder_name,
    samples_of_a_prompt_differ,
    truncated_sampling_recomputes_log_probs,
    corrected_log_probs_are_of_one_law,
    rollouts_divide_evenly,
    a_whole_rollout_fits_a_micro_batch,
    served_depth_is_trained,
    window_covers_the_unroll,
    depth_decay_is_used,
    vllm_arguments_are_lossless,
    the_gate_has_rollouts_to_judge_on,
    train_every_is_used,
    the_lag_limit_allows_the_cadence,
)
