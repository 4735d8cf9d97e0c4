"""Strategies without options."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.instances import StandsFor
from drivetrain.strategies import Single, Strategy

__all__ = ["SingleDeviceStrategy", "Strategy"]


class SingleDeviceStrategy(Single, metaclass=StandsFor, original=Single):
    """One process on one device. What `Trainer(strategy="auto")` makes for one is an instance of it too.

    Args:
        device: Taken for Lightning's sake; `Trainer(accelerator=...)` chooses it.
        accelerator: The same.
    """

    def __init__(self, device: Any = "cpu", accelerator: Any = None) -> None:
        super().__init__()
