"""`WandbLogger`."""

from __future__ import annotations

from drivetrain.trackers import WandbLogger

__all__ = ["WandbLogger"]
