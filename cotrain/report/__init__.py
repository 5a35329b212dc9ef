"""Reports of runs and studies: one HTML page that needs nothing else, its figures as PNGs, and a study's tables."""
