"""The base of callbacks."""

from __future__ import annotations

from drivetrain.callbacks import Callback

__all__ = ["Callback"]
