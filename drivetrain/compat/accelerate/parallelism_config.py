"""`ParallelismConfig` under its module's name."""

from drivetrain.accelerator import ParallelismConfig

__all__ = ["ParallelismConfig"]
