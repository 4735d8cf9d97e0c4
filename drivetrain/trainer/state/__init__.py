"""State of a training run in a checkpoint."""
