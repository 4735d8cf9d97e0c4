"""Strategies without options."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.lightning.instances import StandsFor
from drivetrain.compat.lightning.options import refuse_machinery
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.strategies import Single, Strategy

__all__ = ["SingleDeviceStrategy", "Strategy"]


class SingleDeviceStrategy(StrategyMembers, Single, metaclass=StandsFor, original=Single):
    """One process on one device. What `Trainer(strategy="auto")` makes for one is an instance of it too.

    Args:
        device: Its device until it runs; `Trainer(accelerator=...)` chooses that of the run.
        accelerator: Taken for Lightning's sake.
        checkpoint_io: Not taken.
        precision_plugin: The number format of a run that is given none.
        precision: The same, for Fabric.

    Raises:
        ConfigurationError: A part was given that has one implementation here.
    """

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        precision: Any = None,
    ) -> None:
        refuse_machinery({"checkpoint_io": checkpoint_io}, "SingleDeviceStrategy")
        super().__init__()
        self.take_plugins({"precision_plugin": precision_plugin, "precision": precision})
        self._given_device = torch.device(device)
