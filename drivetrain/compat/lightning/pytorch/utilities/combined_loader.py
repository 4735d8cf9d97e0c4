"""Several loaders as one."""

from __future__ import annotations

from drivetrain.data import CombinedLoader

__all__ = ["CombinedLoader"]
