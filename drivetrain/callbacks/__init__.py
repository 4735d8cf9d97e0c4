"""What happens around the loop: one callback a file."""

from __future__ import annotations

from drivetrain.callbacks.base import Callback

__all__ = ["Callback"]
