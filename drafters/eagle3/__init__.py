"""EAGLE-3: a one-layer drafter that reads hidden states of three target layers."""
