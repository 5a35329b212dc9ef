"""Joint training of a policy and its drafter."""
