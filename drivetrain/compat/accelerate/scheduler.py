"""The prepared scheduler under Accelerate's name."""

from drivetrain.accelerator import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
