"""One process: the same as for the Trainer."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.single_device import SingleDeviceStrategy

__all__ = ["SingleDeviceStrategy"]
