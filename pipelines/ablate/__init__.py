"""Studies: arms x seeds, and one table."""
