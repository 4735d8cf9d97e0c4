"""`FSDPStrategy` with annotations as types rather than strings, which command lines need."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.options import refuse_machinery
from drivetrain.compat.lightning.strategy_members import StrategyMembers
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.fsdp import FSDP

__all__ = ["FSDPStrategy"]

_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "_HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}


class FSDPStrategy(StrategyMembers, FSDP, metaclass=StandsFor, original=FSDP):
    """FSDP: parameters, gradients and optimizer states are sharded across processes."""

    def __init__(
        self,
        cpu_offload: bool | None = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: str = "full",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        device_mesh: tuple[int, int] | None = None,
        mixed_precision: Any = None,
        **kwargs: Any,
    ) -> None:
        self.take_plugins(kwargs)
        options = refuse_machinery(kwargs, "FSDPStrategy")
        name = getattr(sharding_strategy, "name", sharding_strategy)
        name = name.upper() if isinstance(name, str) else name
        if name not in _RESHARDS:
            raise ConfigurationError(
                f"FSDPStrategy(sharding_strategy={sharding_strategy!r}): allowed are {', '.join(_RESHARDS)}."
                f"{nearest(str(name), _RESHARDS)}",
            )
        self._sharding = name
        if device_mesh is not None:
            options["replicate_size"] = device_mesh[0]
        elif "HYBRID" in name and auto_wrap_policy is None:
            raise ConfigurationError(
                f"FSDPStrategy(sharding_strategy={name!r}) needs to know what is sharded. Give auto_wrap_policy, which "
                "has a copy on each machine, or device_mesh=(copies, processes of each).",
            )
        self._counts_copies = device_mesh is None and name not in ("FULL_SHARD", "SHARD_GRAD_OP")
        if mixed_precision is not None:
            options["gather_dtype"], options["reduce_dtype"] = mixed_precision.param_dtype, mixed_precision.reduce_dtype
        self.mixed_precision_config = mixed_precision
        if auto_wrap_policy is not None:
            options["wrap"] = list(auto_wrap_policy) if isinstance(auto_wrap_policy, set) else auto_wrap_policy
        if activation_checkpointing_policy is not None:
            if options.get("activation_checkpointing") is not None:
                raise ConfigurationError(
                    "You cannot set both `activation_checkpointing` and `activation_checkpointing_policy`. Leave the "
                    "first out.",
                )
            chosen = activation_checkpointing_policy
            options["activation_checkpointing"] = list(chosen) if isinstance(chosen, set) else chosen
        super().__init__(
            cpu_offload=bool(getattr(cpu_offload, "offload_params", cpu_offload)),
            **{"reshard_after_forward": _RESHARDS[name] or False, **options},
        )

    def setup(self, state: PartialState) -> None:
        """Join the process group. Sets the number of replicas if it follows from the number of processes."""
        if self._counts_copies:
            environment = state.environment
            within = 1 if self._sharding == "NO_SHARD" else environment.local_world_size
            self.options = replace(self.options, replicate_size=max(1, state.num_processes // within))
        super().setup(state)

    @property
    def sharding_strategy(self) -> Any:
        """The sharding strategy as torch's enum."""
        from drivetrain.strategies.fsdp.model_sharding import ShardingStrategy

        return ShardingStrategy[self._sharding]

    @property
    def cpu_offload(self) -> Any:
        """The CPU offload options as torch's class."""
        from drivetrain.strategies.fsdp.model_sharding import CPUOffload

        return CPUOffload(offload_params=self.options.cpu_offload)
