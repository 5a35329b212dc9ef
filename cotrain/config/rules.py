"""Rules that concern several fields of a configuration. Each broken rule gives a line that names the field and the fix."""

from collections.abc import Iterator

from cotrain.config.lossless_guard import DIVISIONS, engine_problems
from cotrain.config.schema import MIN_PROMPTS, MIN_ROLLOUTS, PolicyConfig, RunConfig

OWNED_VLLM_ARGUMENTS = {
    "model": "set policy.model",
    "tokenizer": "set policy.model",
    "dtype": "set rollout.dtype",
    "seed": "set seed",
    "max_model_len": "set rollout.max_prompt_tokens and rollout.max_new_tokens",
    "speculative_config": "set [drafter] and rollout.num_speculative_tokens / rollout.draft_sample_method",
    "worker_extension_cls": "cotrain's own extension carries the weight transfer and the feature tap",
    "weight_transfer_config": "set policy.weight_transfer",
    "logprobs_mode": "the learner needs log-probs of the sampling distribution",
    "scheduler_cls": "cotrain's scheduler sets the draft length at run time",
    "async_scheduling": "the draft length is read by a synchronous scheduler",
    "disable_log_stats": "acceptance metrics need vLLM's statistics",
    "per_request_spec_decode_metrics": "acceptance is counted by draft length, which needs every verification step",
}
"""vLLM arguments that cotrain sets itself, and what to do instead."""


BYTES_PER_TOKEN = 24
"""Bytes per token of the index of rollouts, as in drafters/suffix/index.py, which is not imported here because it needs numba."""


def broken_rules(config: RunConfig) -> list[str]:
    rules = (
        _log_probs_are_of_one_law,
        _samples_fit_the_learner,
        _lag_fits_the_run,
        _vllm_arguments,
        _drafter_fits_the_steps,
        _index_holds_a_step,
    )
    return [line for rule in rules for line in rule(config)]


def _log_probs_are_of_one_law(config: RunConfig) -> Iterator[str]:
    policy, rollout, correction = config.policy, config.rollout, config.policy.behaviour_correction
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    sampling = f"truncated sampling (top_p={rollout.top_p:g}, top_k={rollout.top_k})"
    if correction is None and policy.behaviour_cap != PolicyConfig.model_fields["behaviour_cap"].default:
        yield (
            f"policy.behaviour_cap: {policy.behaviour_cap:g} has no effect without policy.behaviour_correction; "
            'set that to "truncate" or "mask", or leave behaviour_cap out'
        )
    if correction is not None and policy.old_log_probs != "recomputed":
        yield (
            f"policy.behaviour_correction: '{correction}' corrects the learner's own log-probs; set "
            'policy.old_log_probs = "recomputed", or leave behaviour_correction out'
        )
    if correction is not None and policy.importance_ratio == "sequence":
        yield (
            f'policy.importance_ratio: "sequence" does not go with policy.behaviour_correction = "{correction}", which '
            'weighs single tokens; set importance_ratio = "token", or leave behaviour_correction out'
        )
    if correction is not None and truncated:
        yield (
            f"policy.behaviour_correction: '{correction}' does not go with {sampling}: the engine's log-probs are then "
            "from another distribution than the learner's; leave it out, or set top_p = 1 and top_k = 0"
        )
    if policy.old_log_probs == "rollout" and truncated:
        yield (
            f"policy.old_log_probs: 'rollout' does not go with {sampling}, whose log-probs are not the policy's; set "
            'it to "recomputed", or top_p = 1 and top_k = 0'
        )


def _samples_fit_the_learner(config: RunConfig) -> Iterator[str]:
    policy, rollout = config.policy, config.rollout
    # Both choices of policy.advantage compare the samples of one prompt with each other.
    advantage = f"policy.advantage={policy.advantage}"
    if rollout.temperature == 0:
        yield (
            f"rollout.temperature: 0 makes all samples of a prompt equal, so {advantage} is 0 everywhere; set it above "
            "0, for example 1.0"
        )
    if rollout.samples_per_prompt == 1:
        yield f"rollout.samples_per_prompt: 1 leaves {advantage} nothing to compare a sample with; set 2 or more"
    if rollout.rollouts_per_step % (policy.minibatches * policy.num_processes):
        yield (
            f"rollout.prompts_per_step: {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples "
            f"(rollout.samples_per_prompt) = {rollout.rollouts_per_step} rollouts cannot be divided by "
            f"policy.minibatches x policy.num_processes = {policy.minibatches} x {policy.num_processes}; change one of "
            "the four"
        )
    if policy.micro_batch_tokens < rollout.max_model_len:
        yield (
            f"policy.micro_batch_tokens: {policy.micro_batch_tokens} is less than one rollout of full length "
            f"(rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.max_model_len}); raise it to that or more, or lower "
            "one of these two, which must fit the context of the model too"
        )


def _lag_fits_the_run(config: RunConfig) -> Iterator[str]:
    policy, rollout, stream = config.policy, config.rollout, config.stream
    lag, synchronous = f"stream.max_policy_lag = {stream.max_policy_lag}", "or set max_policy_lag = 0"
    if stream.max_policy_lag == 0:
        if stream.on_swap != "recompute":
            yield (
                f'stream.on_swap: "{stream.on_swap}" has no effect with {lag}, where no rollout is under way when '
                "weights are swapped; leave on_swap out, or raise max_policy_lag"
            )
        return
    if stream.max_policy_lag >= config.steps:
        yield f"stream.max_policy_lag: {stream.max_policy_lag} is not below steps = {config.steps}; lower it"
    if rollout.synchronous_batches:
        yield (
            f"rollout.synchronous_batches: true makes batches the same in every run, which is impossible with {lag}; "
            f"leave it out, {synchronous}"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"rollout.top_{'p' if rollout.top_p < 1 else 'k'}: with {lag} the loss needs the engine's log-probs, and "
            f"those of truncated sampling are from another distribution than the learner's; set top_p = 1 and top_k = 0, "
            f"{synchronous}"
        )
    if policy.old_log_probs == "recomputed" and policy.behaviour_correction is None:
        yield (
            f'policy.old_log_probs: "recomputed" without a correction ignores the lag of {lag}; set '
            'policy.behaviour_correction = "truncate" or "mask", or old_log_probs = "rollout"'
        )
    if stream.on_swap == "keep_kv" and config.drafter is not None and config.lossless.every:
        yield (
            "lossless.every: the monitor compares rollouts with the distribution of one policy, and keep_kv mixes two; set "
            'lossless.every = 0, or stream.on_swap = "recompute"'
        )


def _vllm_arguments(config: RunConfig) -> Iterator[str]:
    arguments = config.rollout.vllm
    owned = [(key, f"is set by cotrain: {fix}") for key, fix in OWNED_VLLM_ARGUMENTS.items() if key in arguments]
    refused = [problem for problem in engine_problems(arguments) if config.speculates or problem[0] in DIVISIONS]
    for key, message in (*owned, *refused):
        yield f"rollout.vllm.{key}: {message}"
    ranks = arguments.get("tensor_parallel_size", 1)
    if type(ranks) is not int or ranks < 1:
        yield f"rollout.vllm.tensor_parallel_size: {ranks!r} is no whole number from 1 on; set one, or leave it out"


def depth_problems(field: str, num_speculative_tokens: int, depth: int) -> list[str]:
    """List a problem if more tokens are drafted than the drafter is trained for; `field` is what sets their number."""
    fix = "lower it, or raise trained_depth when the drafter is trained"
    problem = f"{field}: {num_speculative_tokens} is above drafter.model.trained_depth = {depth}; {fix}"
    return [problem] * (num_speculative_tokens > depth)


def _drafter_fits_the_steps(config: RunConfig) -> Iterator[str]:
    drafter, rollout = config.drafter, config.rollout
    if drafter is None:
        return
    longest, depth = rollout.num_speculative_tokens, drafter.model.trained_depth
    yield from depth_problems("rollout.num_speculative_tokens", longest, depth)
    if not drafter.train or drafter.gate.publish_when == "always":
        return
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    # A single sample of each prompt is refused by another rule.
    if prompts < MIN_PROMPTS or (prompts * samples < MIN_ROLLOUTS and samples > 1):
        yield (
            f"rollout.prompts_per_step: drafters are scored on the {prompts} prompts x {samples} samples "
            f"(rollout.samples_per_prompt) of a step, and drafter.gate needs {MIN_PROMPTS} prompts and {MIN_ROLLOUTS} "
            'rollouts; raise one of the two, or set drafter.gate.publish_when = "always"'
        )


def _index_holds_a_step(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    needed = BYTES_PER_TOKEN * 2 * rollout.rollouts_per_step * (rollout.max_new_tokens + 1)
    if rollout.history is not None and rollout.history.max_bytes < needed:
        yield (
            f"rollout.history.max_bytes: {rollout.history.max_bytes} cannot hold a step of rollouts of full length, which is what "
            f"the index drafts from in the next epoch; set {needed} or more"
        )
