"""Whole runs. Read these first; nothing imports them."""
