"""MTP: one decoder layer that reads the target's final hidden state and is run again for every draft position."""
