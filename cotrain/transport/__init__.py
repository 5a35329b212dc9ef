"""What moves between processes as files: weights and features."""
