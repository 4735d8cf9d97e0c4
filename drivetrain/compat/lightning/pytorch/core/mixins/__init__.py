"""Mixins of modules and data modules."""

from __future__ import annotations

from drivetrain.compat.lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin

__all__ = ["HyperparametersMixin"]
