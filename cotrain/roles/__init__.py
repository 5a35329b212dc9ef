"""The three roles as Ray actors."""
