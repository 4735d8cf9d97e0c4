"""Strategies, which place a model on one or more processes: one file or folder each, derived from `base.Strategy`."""

from drivetrain.strategies.base import Strategy
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.registry import (
    Single,
    available_strategies,
    register_strategy,
    resolve_ddp,
    resolve_strategy,
    started_by_verbs,
)
from drivetrain.strategies.step_module import StepModule

__all__ = [
    "DDP",
    "Single",
    "StepModule",
    "Strategy",
    "available_strategies",
    "register_strategy",
    "resolve_ddp",
    "resolve_strategy",
    "started_by_verbs",
]
