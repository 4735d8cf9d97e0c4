"""`CometLogger`."""

from __future__ import annotations

from drivetrain.trackers import CometLogger

__all__ = ["CometLogger"]
