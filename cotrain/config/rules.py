"""Rules that concern several fields of a configuration. Each broken rule gives a line that names the field and the fix."""

from collections.abc import Iterator

from cotrain.config.lossless_guard import ALWAYS_REFUSED, engine_problems
from cotrain.config.schema import (
    AUTO,
    BYTES_PER_TOKEN,
    MIN_PROMPTS,
    MIN_ROLLOUTS,
    DatasetTask,
    DrafterConfig,
    EnvironmentTask,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
)


def broken_rules(config: RunConfig) -> list[str]:
    lines = [*_learner_rules(config.policy, config.rollout), *_lag_rules(config), *_engine_rules(config)]
    held_out = config.validation.task if config.validation else None
    for field, task in (("task", config.task), ("validation.task", held_out)):
        if isinstance(task, DatasetTask) and len(task.reward_weights) not in (0, len(task.reward)):
            number = f"{len(task.reward_weights)} do not fit the {len(task.reward)} of {field}.reward"
            lines.append(f"{field}.reward_weights: {number}; set one for each, or leave them out")
        if isinstance(task, EnvironmentTask):
            if (task.factory is None) == (not task.verifiers):
                lines.append(
                    f"{field}.factory: an environment is made by a factory or by {field}.verifiers; give one of them"
                )
            if task.verifiers and task.path is not None:
                lines.append(f"{field}.path: verifiers has tasks of its own; leave it out")
    return lines + (_drafter_rules(config.drafter, config.rollout) if config.drafter else [])


def _learner_rules(policy: PolicyConfig, rollout: RolloutConfig) -> Iterator[str]:
    correction, advantage = policy.behaviour_correction, f"policy.advantage={policy.advantage}"
    if correction is None and policy.behaviour_cap != PolicyConfig.model_fields["behaviour_cap"].default:
        fix = 'set that to "truncate" or "mask", or leave behaviour_cap out'
        yield f"policy.behaviour_cap: {policy.behaviour_cap:g} has no effect without policy.behaviour_correction; {fix}"
    if correction is not None and policy.old_log_probs != "recomputed":
        fix = 'set policy.old_log_probs = "recomputed", or leave behaviour_correction out'
        yield f"policy.behaviour_correction: '{correction}' corrects the learner's own log-probs; {fix}"
    if correction is not None and policy.importance_ratio == "sequence":
        what = f'"sequence" does not go with policy.behaviour_correction = "{correction}", which weighs single tokens'
        fix = 'set importance_ratio = "token", or leave behaviour_correction out'
        yield f"policy.importance_ratio: {what}; {fix}"
    if (rollout.top_p < 1 or rollout.top_k > 0) and (correction is not None or policy.old_log_probs == "rollout"):
        field, fix = f"behaviour_correction: '{correction}'", "leave it out"
        if correction is None:
            field, fix = "old_log_probs: 'rollout'", 'set it to "recomputed" (at max_policy_lag = 0)'
        yield (
            f"policy.{field} does not go with truncated sampling (rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}):"
            " the engine's log-probs are then from another distribution than the learner's; "
            f"{fix}, or set top_p = 1 and top_k = 0"
        )
    if policy.lora is not None and not policy.train:
        yield "policy.lora: a policy that does not train has no adapters; leave it out, or set policy.train = true"
    # Both choices of policy.advantage compare the samples of one prompt with each other.
    if rollout.temperature == 0:
        fix = "set it above 0, for example 1.0"
        yield f"rollout.temperature: 0 makes all samples of a prompt equal, so {advantage} is 0 everywhere; {fix}"
    if rollout.samples_per_prompt == 1:
        yield f"rollout.samples_per_prompt: 1 leaves {advantage} nothing to compare a sample with; set 2 or more"
    if rollout.rollouts_per_step % (policy.minibatches * policy.num_processes):
        yield (
            f"rollout.prompts_per_step: {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples "
            f"(rollout.samples_per_prompt) = {rollout.rollouts_per_step} rollouts cannot be divided by policy.minibatches x "
            f"policy.num_processes = {policy.minibatches} x {policy.num_processes}; change one of the four"
        )
    if policy.micro_batch_tokens < rollout.max_model_len:
        yield (
            f"policy.micro_batch_tokens: {policy.micro_batch_tokens} is less than one rollout of full length "
            f"(rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.max_model_len}); raise it to that or more, or lower "
            "one of these two, which must fit the context of the model too"
        )


def _lag_rules(config: RunConfig) -> Iterator[str]:
    policy, stream = config.policy, config.stream
    lag = f"stream.max_policy_lag = {stream.max_policy_lag}"
    if stream.max_policy_lag == 0:
        return
    if stream.max_policy_lag >= config.steps:
        yield f"stream.max_policy_lag: {stream.max_policy_lag} is not below steps = {config.steps}; lower it"
    if config.rollout.synchronous_batches:
        what = f"true makes batches the same in every run, which is impossible with {lag}"
        yield f"rollout.synchronous_batches: {what}; leave it out, or set max_policy_lag = 0"
    if policy.old_log_probs == "recomputed" and policy.behaviour_correction is None:
        fix = 'set policy.behaviour_correction = "truncate" or "mask", or old_log_probs = "rollout"'
        yield f'policy.old_log_probs: "recomputed" without a correction ignores the lag of {lag}; {fix}'


def _engine_rules(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if isinstance(config.task, EnvironmentTask) and rollout.synchronous_batches:
        what = "true makes batches the same in every run, which environments do not, as they answer when they are done"
        yield f"rollout.synchronous_batches: {what}; leave it out"
    for key, message in engine_problems(rollout.vllm):
        if config.speculates or key in ALWAYS_REFUSED:
            yield f"rollout.vllm.{key}: {message}"
    ranks = rollout.vllm.get("tensor_parallel_size", 1)
    if type(ranks) is not int or ranks < 1:
        yield f"rollout.vllm.tensor_parallel_size: {ranks!r} is no whole number from 1 on; set one, or leave it out"
    if rollout.history is not None and config.drafter is not None:
        what = "an engine drafts from a history or from a drafter, as both together were no faster in whole steps"
        yield f"rollout.history: {what} (docs/measurements/history.md); leave out rollout.history or drafter"
    needed = BYTES_PER_TOKEN * 2 * rollout.rollouts_per_step * (rollout.max_new_tokens + 1)
    if rollout.history is not None and rollout.history.max_bytes < needed:
        yield (
            f"rollout.history.max_bytes: {rollout.history.max_bytes} cannot hold a step of rollouts of full length, which is what "
            f"the index drafts from in the next epoch; set {needed} or more"
        )


def depth_problems(field: str, num_speculative_tokens: int, depth: int) -> list[str]:
    """List a problem if more tokens are drafted than the drafter is trained for; `field` is what sets their number."""
    fix = "lower it, or raise trained_depth when the drafter is trained"
    problem = f"{field}: {num_speculative_tokens} is above drafter.model.trained_depth = {depth}; {fix}"
    return [problem] * (num_speculative_tokens > depth)


def _drafter_rules(drafter: DrafterConfig, rollout: RolloutConfig) -> list[str]:
    depth, prompts, samples = drafter.model.trained_depth, rollout.prompts_per_step, rollout.samples_per_prompt
    lines = depth_problems("rollout.num_speculative_tokens", rollout.num_speculative_tokens, depth)
    if drafter.init == AUTO and not drafter.train:
        lines.append(
            'drafter.init: "auto" chooses what training starts from; name the drafter, or set drafter.train = true'
        )
    # A single sample of each prompt is refused by another rule.
    few = prompts < MIN_PROMPTS or (prompts * samples < MIN_ROLLOUTS and samples > 1)
    if drafter.train and drafter.gate.publish_when != "always" and few:
        lines.append(
            f"rollout.prompts_per_step: drafters are scored on the {prompts} prompts x {samples} samples "
            f"(rollout.samples_per_prompt) of a step, and drafter.gate needs {MIN_PROMPTS} prompts and {MIN_ROLLOUTS} "
            'rollouts; raise one of the two, or set drafter.gate.publish_when = "always"'
        )
    return lines
