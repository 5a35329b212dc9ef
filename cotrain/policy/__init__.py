"""The policy learner: rewards in, policy update out."""
