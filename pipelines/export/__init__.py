"""A run's policy and drafter as folders that stock vLLM serves."""
