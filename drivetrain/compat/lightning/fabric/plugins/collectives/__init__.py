"""Collective operations for code that creates its own process groups."""

from __future__ import annotations

from drivetrain.compat.lightning.fabric.plugins.collectives.collective import Collective
from drivetrain.compat.lightning.fabric.plugins.collectives.single_device import SingleDeviceCollective
from drivetrain.compat.lightning.fabric.plugins.collectives.torch_collective import TorchCollective

__all__ = ["Collective", "SingleDeviceCollective", "TorchCollective"]
