"""Tasks: where prompts come from and how a response is scored."""
