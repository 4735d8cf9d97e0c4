"""`LightningOptimizer`, the optimizer type for manual optimization."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer

from drivetrain.accelerator import PreparedOptimizer
from drivetrain.compat.instances import StandsFor

__all__ = ["LightningOptimizer"]


class LightningOptimizer(metaclass=StandsFor, original=PreparedOptimizer):
    """Type of the optimizers that `self.optimizers()` returns."""

    _bare: ClassVar[Optimizer]

    def __new__(cls, optimizer: Optimizer) -> LightningOptimizer:
        kind = type(optimizer)
        both: Any = StandsFor(f"Lightning{kind.__name__}", (cls, kind), {"_bare": optimizer})
        made: LightningOptimizer = object.__new__(both)
        made.__dict__ = optimizer.__dict__
        return made

    def __init__(self, optimizer: Optimizer) -> None:
        """Accept the optimizer, which `__new__` has already converted."""

    @property
    def optimizer(self) -> Any:
        """The original optimizer."""
        return self._bare
