"""Searches for a learning rate or a batch size before a run."""
