"""Installing torch_xla."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import absent_names

__getattr__ = absent_names(__name__, ('Install it with pip install "drivetrain[xla]".', ["install_xla"]))
