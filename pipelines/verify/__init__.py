"""The test that speculation leaves the sampled distribution alone."""
