"""Settings that no policy learner can train with. Imports no torch, so that --dry-run stays fast."""

from cotrain.config import PolicyConfig, RolloutConfig


def check_settings(config: PolicyConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError naming the field that rules out training, and the fix. Needs neither torch nor a model."""
    if rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature is 0: greedy samples of a prompt are all alike and have no log-prob to learn from; "
            "set it above 0"
        )
    if config.old_log_probs == "rollout" and (rollout.top_p < 1 or rollout.top_k > 0):
        raise ValueError(
            "rollout.top_p < 1 or rollout.top_k > 0 truncates the behaviour distribution, so its log-probs are not "
            "comparable with the learner's; set policy.old_log_probs=recomputed, or top_p=1 and top_k=0"
        )
    if config.micro_batch_tokens < rollout.max_model_len:
        raise ValueError(
            f"policy.micro_batch_tokens is {config.micro_batch_tokens}, less than the longest rollout "
            f"(rollout.max_prompt_tokens + rollout.max_new_tokens = {rollout.max_model_len}); raise it to at least that"
        )
    if rollout.rollouts_per_step < config.minibatches * config.num_processes:
        raise ValueError(
            f"policy.minibatches x policy.num_processes = {config.minibatches * config.num_processes} is more than "
            f"the {rollout.rollouts_per_step} rollouts of a step; lower one of them"
        )
