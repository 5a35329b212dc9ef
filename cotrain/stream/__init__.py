"""The stream of groups between prompts and policy updates: how many may be under way, and what each of them is at."""
