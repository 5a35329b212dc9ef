"""Which drafter serves: evidence from each step, one decision about it, and what is done about the decision."""
