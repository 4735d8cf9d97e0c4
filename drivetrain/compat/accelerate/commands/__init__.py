"""Accelerate's commands that scripts call as functions."""
