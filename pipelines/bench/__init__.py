"""Speculation arms side by side on one engine."""
