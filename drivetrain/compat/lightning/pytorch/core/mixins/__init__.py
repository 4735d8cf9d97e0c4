"""`HyperparametersMixin`: what a class needs to keep its hyper-parameters."""

from __future__ import annotations

from drivetrain.trainer.hyper_parameters import HoldsHyperParameters as HyperparametersMixin

__all__ = ["HyperparametersMixin"]
