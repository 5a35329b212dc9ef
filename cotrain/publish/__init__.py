"""Whether a drafter is published, kept or taken back."""
