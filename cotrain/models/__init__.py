"""Policies on disk: where they come from and what they are."""
