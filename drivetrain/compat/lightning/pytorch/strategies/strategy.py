"""Strategies without options."""

from __future__ import annotations

from typing import Any

from drivetrain.strategies import Single, Strategy

__all__ = ["SingleDeviceStrategy", "Strategy"]


class SingleDeviceStrategy(Single):
    """One process on one device.

    Args:
        device: Taken for Lightning's sake; `Trainer(accelerator=...)` chooses it.
        accelerator: The same.
    """

    def __init__(self, device: Any = "cpu", accelerator: Any = None) -> None:
        super().__init__()
