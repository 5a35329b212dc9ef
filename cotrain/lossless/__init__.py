"""Statistics that test whether generated text has the target's distribution; they know records, but no engine."""
