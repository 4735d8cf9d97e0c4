"""`DDPStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation
from drivetrain.compat.lightning.options import refuse_machinery
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.strategies import DDP
from drivetrain.strategies.registry import Spawned

__all__ = ["DDPStrategy"]


class DDPStrategy(StrategyMembers, DDP, metaclass=StandsFor, original=DDP):
    """DDP: one model replica per process. The strategy of `Trainer(strategy="ddp")` passes `isinstance`."""

    def __init__(
        self,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        **kwargs: Any,
    ) -> None:
        self.take_plugins(kwargs)
        options = refuse_machinery(kwargs, "DDPStrategy", ("ddp_comm_wrapper", "model_averaging_period"))
        if ddp_comm_hook is not None:
            options["comm_hook"] = ddp_comm_hook
        if ddp_comm_state is not None:
            options["comm_hook_options"] = {"state": ddp_comm_state}
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            **options,
        )
        self.process_group_backend = process_group_backend

    @property
    def is_distributed(self) -> bool:
        """Always True. Deprecated in Lightning, so reading it warns."""
        rank_zero_deprecation("`DDPStrategy.is_distributed` is deprecated. Use `trainer.world_size > 1` instead.")
        return True


DDPStrategy.register(Spawned)
