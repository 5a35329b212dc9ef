"""Reading of recorded runs and drawing of self-contained pages."""
