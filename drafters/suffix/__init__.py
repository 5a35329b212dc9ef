"""Drafting from history: an index of finished rollouts that proposes what followed the same text before.

It imports neither torch nor vLLM, but numba.
"""
