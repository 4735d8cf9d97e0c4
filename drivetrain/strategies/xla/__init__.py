"""Models on XLA devices: one, or all devices of a process as one mesh."""

from drivetrain.strategies.xla.strategy import XLA, XLAFSDP

__all__ = ["XLA", "XLAFSDP"]
