"""`FSDPStrategy`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from drivetrain.compat.lightning.options import refuse_machinery
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.fsdp import FSDP

__all__ = ["FSDPStrategy"]

_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class FSDPStrategy(StrategyMembers, FSDP):
    """Parameters, gradients and optimizer states sharded over processes.

    Args:
        cpu_offload: Whether what is sharded stays on the CPU.
        auto_wrap_policy: Classes of modules to wrap, a set of them; or None for the blocks that are found.
        activation_checkpointing_policy: Classes of modules whose activations are computed again in the backward.
        sharding_strategy: `"FULL_SHARD"` or `"SHARD_GRAD_OP"`.
        state_dict_type: Taken for Lightning's sake; checkpoints are sharded, and hold the names of the whole model.
        process_group_backend: Taken for Lightning's sake.
        timeout: Taken for Lightning's sake.
        **kwargs: Options of `drivetrain.FSDP`.

    Raises:
        ConfigurationError: A sharding strategy or a policy that is not one of these.
    """

    def __init__(
        self,
        cpu_offload: bool | None = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: str = "full",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        options = refuse_machinery(kwargs, "FSDPStrategy", ("mixed_precision", "device_mesh", "kwargs"))
        name = getattr(sharding_strategy, "name", sharding_strategy)
        if name not in _RESHARDS:
            raise ConfigurationError(
                f"FSDPStrategy(sharding_strategy={sharding_strategy!r}): allowed are {', '.join(_RESHARDS)}. For "
                "hybrid sharding give drivetrain.FSDP(replicate_size=...), for none DDPStrategy()."
            )
        if auto_wrap_policy is not None:
            options["wrap"] = list(auto_wrap_policy) if isinstance(auto_wrap_policy, set) else auto_wrap_policy
        if activation_checkpointing_policy is not None:
            if options.get("activation_checkpointing") is not None:
                raise ConfigurationError(
                    "You cannot set both `activation_checkpointing` and `activation_checkpointing_policy`. Leave the "
                    "first out."
                )
            chosen = activation_checkpointing_policy
            options["activation_checkpointing"] = list(chosen) if isinstance(chosen, set) else chosen
        super().__init__(
            cpu_offload=bool(cpu_offload), **{"reshard_after_forward": _RESHARDS[name] or False, **options}
        )
