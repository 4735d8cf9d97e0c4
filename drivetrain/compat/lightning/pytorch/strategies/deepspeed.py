"""`DeepSpeedStrategy`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.compat.lightning.options import refuse_machinery
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.strategies.deepspeed import DeepSpeed

__all__ = ["DeepSpeedStrategy"]


class DeepSpeedStrategy(StrategyMembers, DeepSpeed):
    """DeepSpeed's ZeRO.

    Args:
        stage: The stage of ZeRO; of a configuration, the one in it.
        offload_optimizer: Whether optimizer states are on the CPU.
        offload_parameters: Whether parameters are, in stage 3.
        config: DeepSpeed's configuration, or a path to it, which then counts alone.
        **kwargs: Further options of ZeRO, by DeepSpeed's names.
    """

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        options = refuse_machinery(kwargs, "DeepSpeedStrategy")
        if config is not None:
            super().__init__(config=config, **options)
            return
        super().__init__(
            stage,
            offload_optimizer="cpu" if offload_optimizer else None,
            offload_param="cpu" if offload_parameters else None,
            **options,
        )
