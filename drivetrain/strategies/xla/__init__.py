"""Strategies for XLA devices such as TPUs."""

from drivetrain.strategies.xla.strategy import XLA, XLAFSDP

__all__ = ["XLA", "XLAFSDP"]
