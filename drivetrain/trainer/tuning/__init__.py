"""What is tried out before a run: learning rates and batch sizes. Nothing of a trial remains."""
