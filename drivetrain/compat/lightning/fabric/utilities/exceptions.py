"""Errors, under the names of Lightning."""

from __future__ import annotations

from drivetrain.runtime.errors import ConfigurationError as MisconfigurationException

__all__ = ["MisconfigurationException"]
