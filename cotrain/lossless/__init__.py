"""Is generated text distributed as the target says? The statistics behind `cotrain verify`; no engine, no model."""
