"""How many tokens are drafted: measured step times, acceptance and the choice."""
