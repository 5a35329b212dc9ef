"""Joint policy-drafter training: the machinery of a run."""

__version__ = "0.1.0"
