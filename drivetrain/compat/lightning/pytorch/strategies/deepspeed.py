"""`DeepSpeedStrategy`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.options import refuse_machinery
from drivetrain.compat.lightning.registry import CONFIG_VARIABLE
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.deepspeed.config import Config, read_config, stage_of

__all__ = ["DeepSpeedStrategy"]

_ZERO = "zero_optimization"


class DeepSpeedStrategy(StrategyMembers, DeepSpeed, metaclass=StandsFor, original=DeepSpeed):
    """DeepSpeed with ZeRO stages 1 to 3."""

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        partition_activations: bool = False,
        cpu_checkpointing: bool = False,
        contiguous_memory_optimization: bool = False,
        synchronize_checkpoint_boundary: bool = False,
        **kwargs: Any,
    ) -> None:
        self.take_plugins(kwargs)
        options = refuse_machinery(kwargs, "DeepSpeedStrategy")
        config = os.environ.get(CONFIG_VARIABLE) if config is None else config
        self._names_stage = config is None
        if config is not None:
            whole = read_config(config)
            self._names_stage = stage_of(whole) is not None
            super().__init__(None if self._names_stage else 0, config=whole, **options)
            return
        recomputed = {
            "partition_activations": partition_activations,
            "cpu_checkpointing": cpu_checkpointing,
            "contiguous_memory_optimization": contiguous_memory_optimization,
            "synchronize_checkpoint_boundary": synchronize_checkpoint_boundary,
        }
        super().__init__(
            stage,
            offload_optimizer="cpu" if offload_optimizer else None,
            offload_param="cpu" if offload_parameters else None,
            config={"activation_checkpointing": recomputed} if any(recomputed.values()) else None,
            **options,
        )

    @property
    def config(self) -> Config:
        """The DeepSpeed configuration, without a ZeRO stage unless the user's configuration names one."""
        config = super().config
        if self._names_stage:
            return config
        zero = {key: value for key, value in config[_ZERO].items() if key != "stage"}
        rest = {key: value for key, value in config.items() if key != _ZERO}
        return {**rest, _ZERO: zero} if zero else rest
