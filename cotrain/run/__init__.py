"""What a run keeps: its folder, metrics, checkpoints, tracking and console."""
