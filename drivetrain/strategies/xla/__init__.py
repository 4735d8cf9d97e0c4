"""Models on XLA devices: one, or all devices of a process as one mesh."""

from drivetrain.strategies.xla.fsdp import XLAFSDP
from drivetrain.strategies.xla.strategy import XLA

__all__ = ["XLA", "XLAFSDP"]
