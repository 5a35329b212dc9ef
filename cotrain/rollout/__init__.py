"""Rollouts from a real vLLM engine: generation, feature tap, weight transfer."""
