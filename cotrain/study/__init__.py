"""Studies: what an arm runs (plan), what is done already (state), running it (jobs), its MLflow run (tracking)."""
