"""Rules between the fields of a configuration. Each broken one gives a line that names the field and the fix."""

from collections.abc import Iterator

from cotrain.config.lossless_guard import engine_problems
from cotrain.config.publish import MIN_PROMPTS, MIN_ROLLOUTS
from cotrain.config.schema import RunConfig

OWNED_VLLM_ARGUMENTS = {
    "model": "set policy.model",
    "tokenizer": "set policy.model",
    "dtype": "set rollout.dtype",
    "seed": "set seed",
    "max_model_len": "set rollout.max_prompt_tokens and rollout.max_new_tokens",
    "speculative_config": "set [drafter] and rollout.num_speculative_tokens / rollout.draft_sample_method",
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


def broken_rules(config: RunConfig) -> list[str]:
    """Every rule that the configuration breaks, one line each."""
    return [line for rule in RULES for line in rule(config)]


def a_correction_has_what_it_corrects(config: RunConfig) -> Iterator[str]:
    policy, rollout = config.policy, config.rollout
    correction = policy.behaviour_correction
    if correction == "none":
        if policy.behaviour_cap != type(policy).model_fields["behaviour_cap"].default:
            yield (
                f'policy.behaviour_cap: {policy.behaviour_cap:g} has no effect with policy.behaviour_correction = "none"; '
                'set that to "truncate" or "mask", or leave behaviour_cap out'
            )
        return
    if policy.old_log_probs != "recomputed":
        yield (
            f"policy.behaviour_correction: '{correction}' corrects the learner's own log-probs; set "
            'policy.old_log_probs = "recomputed", or leave behaviour_correction out, since the importance ratio is to '
            "the engine's already"
        )
    if policy.importance_ratio == "sequence":
        yield (
            f'policy.importance_ratio: "sequence" does not go with policy.behaviour_correction = "{correction}", which '
            'weighs single tokens; set importance_ratio = "token", or behaviour_correction = "none"'
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"policy.behaviour_correction: '{correction}' does not go with truncated sampling (top_p={rollout.top_p:g}, "
            f"top_k={rollout.top_k}): the engine's log-probs are then of another law than the learner's; set it to "
            '"none", or top_p = 1 and top_k = 0'
        )


def truncated_sampling_recomputes_log_probs(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if config.policy.old_log_probs == "rollout" and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"policy.old_log_probs: 'rollout' does not go with truncated sampling (top_p={rollout.top_p:g}, "
            f'top_k={rollout.top_k}), whose log-probs are not the policy\'s; set it to "recomputed", or top_p = 1 and '
            "top_k = 0"
        )


def samples_of_a_prompt_differ(config: RunConfig) -> Iterator[str]:
    # Both choices of policy.advantage compare the samples of one prompt with each other.
    advantage = f"policy.advantage={config.policy.advantage}"
    if config.rollout.temperature == 0:
        yield (
            f"rollout.temperature: 0 makes all samples of a prompt equal, so {advantage} is 0 everywhere; set it above "
            "0, for example 1.0"
        )
    if config.rollout.samples_per_prompt == 1:
        yield (
            f"rollout.samples_per_prompt: 1 leaves {advantage} nothing to compare a sample with; set it to 2 or more"
        )


def rollouts_divide_evenly(config: RunConfig) -> Iterator[str]:
    policy, rollout = config.policy, config.rollout
    if rollout.rollouts_per_step % (policy.minibatches * policy.num_processes):
        yield (
            f"rollout.prompts_per_step: {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples "
            f"(rollout.samples_per_prompt) = {rollout.rollouts_per_step} rollouts cannot be divided by "
            f"policy.minibatches x policy.num_processes = {policy.minibatches} x {policy.num_processes}; change one of "
            "the four"
        )


def a_whole_rollout_fits_a_micro_batch(config: RunConfig) -> Iterator[str]:
    if config.policy.micro_batch_tokens < config.rollout.max_model_len:
        yield (
            f"policy.micro_batch_tokens: {config.policy.micro_batch_tokens} is less than one rollout of full length "
            f"(rollout.max_prompt_tokens + rollout.max_new_tokens = {config.rollout.max_model_len}); raise it to at "
            "least that"
        )


def vllm_arguments_are_for_the_user(config: RunConfig) -> Iterator[str]:
    arguments = config.rollout.vllm
    for key in arguments:
        if key in OWNED_VLLM_ARGUMENTS:
            yield f"rollout.vllm.{key}: is set by cotrain: {OWNED_VLLM_ARGUMENTS[key]}"
    if config.drafter is not None:
        others = {key: value for key, value in arguments.items() if key not in OWNED_VLLM_ARGUMENTS}
        for key, message in engine_problems(others):
            yield f"rollout.vllm.{key}: {message}"


def served_depth_is_trained(config: RunConfig) -> Iterator[str]:
    if config.drafter is None:
        return
    served, trained = config.rollout.num_speculative_tokens, config.drafter.model.trained_depth
    if served > trained:
        yield (
            f"rollout.num_speculative_tokens: {served} is above drafter.model.trained_depth = {trained}; lower it, or raise "
            "trained_depth"
        )


def the_gate_has_rollouts_to_evaluate(config: RunConfig) -> Iterator[str]:
    drafter, rollout = config.drafter, config.rollout
    if drafter is None or not drafter.train or drafter.gate.publish_when == "always":
        return
    prompts, samples, way_on = rollout.prompts_per_step, rollout.samples_per_prompt, "or set drafter.gate.publish_when"
    if prompts < MIN_PROMPTS:
        yield (
            f"rollout.prompts_per_step: a step has {prompts} prompts to score a drafter on, and drafter.gate needs "
            f'{MIN_PROMPTS}; raise it, {way_on} = "always"'
        )
    # A single sample of each prompt is refused by another rule.
    elif rollout.rollouts_per_step < MIN_ROLLOUTS and samples > 1:
        yield (
            f"rollout.prompts_per_step: {prompts} prompts x {samples} samples (rollout.samples_per_prompt) are "
            f"{rollout.rollouts_per_step} rollouts to score a drafter on, and drafter.gate needs {MIN_ROLLOUTS}; raise "
            f'one of the two, {way_on} = "always"'
        )


RULES = (
    a_correction_has_what_it_corrects,
    truncated_sampling_recomputes_log_probs,
    samples_of_a_prompt_differ,
    rollouts_divide_evenly,
    a_whole_rollout_fits_a_micro_batch,
    vllm_arguments_are_for_the_user,
    served_depth_is_trained,
    the_gate_has_rollouts_to_evaluate,
)
