"""Loops for training, validation, test and prediction, and the optimizer step."""
