"""Processes of a run: placement, threads, and what is left when one dies."""
