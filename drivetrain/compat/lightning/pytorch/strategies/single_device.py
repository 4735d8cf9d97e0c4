"""`SingleDeviceStrategy`."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.strategies.strategy import SingleDeviceStrategy

__all__ = ["SingleDeviceStrategy"]
