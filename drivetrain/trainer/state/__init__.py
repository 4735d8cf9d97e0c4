"""What of a training run goes into a checkpoint, and back."""
