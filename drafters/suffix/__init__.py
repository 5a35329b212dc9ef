"""Drafting from history: an index of finished rollouts that proposes what followed the same text before.

It imports neither torch nor vLLM. numba is imported with `law`, so import `index` late in a process that runs vLLM: its CPU
build does not start where numba was imported before it.
"""
