"""Accelerate's commands that scripts call as functions."""

from drivetrain.compat.handed_on import absent_names

__getattr__ = absent_names(__name__)
