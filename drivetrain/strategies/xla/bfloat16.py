"""Letting XLA round floats to bfloat16 wherever they are, which torch does not see."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from drivetrain.runtime import xla
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

DOWNCAST_VARIABLE = "DRIVETRAIN_DOWNCAST_BF16"
"""Set to 1 by `drivetrain launch --downcast_bf16`."""


@dataclass(frozen=True)
class Rounding:
    """What XLA makes of floats before it computes."""

    option: str | None = None
    variable: str | None = None

    @classmethod
    def choose(cls, downcast: bool | None, use: bool) -> Rounding:
        """What the options ask for."""
        if downcast and use:
            raise ConfigurationError("downcast_bf16=True keeps 64-bit floats apart, use_bf16=True does not. Give one.")
        if use:
            return cls("use_bf16=True", "XLA_USE_BF16")
        if downcast is None:
            downcast = os.environ.get(DOWNCAST_VARIABLE, "").lower() in {"1", "true", "yes", "on"}
        return cls("downcast_bf16=True", "XLA_DOWNCAST_BF16") if downcast else cls()

    def apply(self) -> None:
        """Ask torch_xla for it, which reads the variable when its runtime starts."""
        if self.variable is None or os.environ.get(self.variable) == "1":
            return
        if xla.is_started():
            raise ConfigurationError(
                f"{self.option} must be known before this process first uses XLA, which it has done already. Set "
                f"{self.variable}=1 before it starts.",
            )
        os.environ[self.variable] = "1"

    def check(self, precision: str) -> None:
        """Refuse a precision that asks for something else, and warn where torch_xla ignores the variable."""
        if self.variable is None:
            return
        if precision != "bf16":
            raise ConfigurationError(
                f"{self.option} is a way to compute in bfloat16, but the precision is {precision!r}. Give "
                "precision='bf16' with it, or leave it out.",
            )
        value = torch.tensor([1.0 + 2.0**-12], device=xla.device()).cpu()
        if value.item() != 1.0:
            logger.warning(
                f"This version of torch_xla does not read {self.variable}, so {self.option} has no effect: the "
                "forward runs under autocast to bfloat16, and parameters stay in 32 bits."
            )
