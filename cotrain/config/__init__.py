"""The configuration of a run: fields, rules between them, loading, errors and help."""
