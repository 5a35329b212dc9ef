"""Drafting from history: an index of finished rollouts that proposes what followed the same text before.

It imports neither torch nor vLLM. `law` and `index` import numba, and vLLM's CPU build does not start after numba has been
imported, so a process that runs vLLM must import them late.
"""
