"""A first drafter from the policy's own rollouts."""
