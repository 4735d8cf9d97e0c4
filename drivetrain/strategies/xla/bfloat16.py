"""Rounding of float tensors to bfloat16 inside XLA, while torch still reports float32."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from drivetrain.runtime import xla
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

DOWNCAST_VARIABLE = "DRIVETRAIN_DOWNCAST_BF16"
"""Environment variable that `drivetrain launch --downcast_bf16` sets to 1."""


@dataclass(frozen=True)
class Rounding:
    """Way of rounding floats to bfloat16 on XLA: the option that selects it, and the environment variable to set."""

    option: str | None = None
    variable: str | None = None

    @classmethod
    def choose(cls, downcast: bool | None, use: bool) -> Rounding:
        """Return the rounding for the options `downcast_bf16` and `use_bf16`, of which only one may be True."""
        if downcast and use:
            raise ConfigurationError("downcast_bf16=True and use_bf16=True cannot be combined. Use only one.")
        if use:
            return cls("use_bf16=True", "XLA_USE_BF16")
        if downcast is None:
            downcast = os.environ.get(DOWNCAST_VARIABLE, "").lower() in {"1", "true", "yes", "on"}
        return cls("downcast_bf16=True", "XLA_DOWNCAST_BF16") if downcast else cls()

    def apply(self) -> None:
        """Set the environment variable by which torch_xla rounds floats to bfloat16, before XLA starts.

        Raise `ConfigurationError` if the XLA runtime has started, because torch_xla reads the variable only then.
        """
        if self.variable is None or os.environ.get(self.variable) == "1":
            return
        if xla.is_started():
            raise ConfigurationError(
                f"{self.option} must be set before this process first uses XLA, which it has already done. Set "
                f"{self.variable}=1 before the process starts.",
            )
        os.environ[self.variable] = "1"

    def check(self, precision: str) -> None:
        """Raise unless the precision is `"bf16"`. Warn if torch_xla does not round floats as the user has chosen."""
        if self.variable is None:
            return
        if precision != "bf16":
            raise ConfigurationError(
                f"{self.option} computes in bfloat16, but the precision is {precision!r}. Use precision='bf16' with "
                "it, or remove it.",
            )
        # 1 + 2^-12 needs more than the 8 bits of bfloat16's significand, so it becomes 1.0 if XLA rounds.
        value = torch.tensor([1.0 + 2.0**-12], device=xla.device()).cpu()
        if value.item() != 1.0:
            logger.warning(
                f"This version of torch_xla does not read {self.variable}, so {self.option} has no effect. The "
                "forward pass runs under autocast to bfloat16, and parameters stay in float32."
            )
