"""Double precision."""

from __future__ import annotations

from typing import Any

from torch import nn

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation
from drivetrain.compat.lightning.plugins import DoublePrecision, under_old_name

__all__ = ["DoublePrecision", "DoublePrecisionPlugin", "LightningDoublePrecisionModule"]

DoublePrecisionPlugin = under_old_name("DoublePrecisionPlugin", DoublePrecision)


class LightningDoublePrecisionModule(nn.Module):
    """Wrapper that runs a module in double precision."""

    def __init__(self, pl_module: nn.Module) -> None:
        rank_zero_deprecation(
            "The `LightningDoublePrecisionModule` is deprecated and no longer needed. Convert the inputs with "
            "`DoublePrecision().convert_input`, and run the forward in `DoublePrecision().forward_context()`."
        )
        super().__init__()
        self.module = pl_module.double()
        self._precision = DoublePrecision()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its inputs converted to double precision."""
        with self._precision.forward_context():
            return self.module(*self._precision.convert_input(args), **self._precision.convert_input(kwargs))
