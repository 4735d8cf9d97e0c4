"""`MLFlowLogger`."""

from __future__ import annotations

from drivetrain.trackers import MLFlowLogger

__all__ = ["MLFlowLogger"]
