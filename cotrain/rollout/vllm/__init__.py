"""Everything that touches vLLM's internals."""
