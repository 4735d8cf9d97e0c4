"""Sizes of the device mesh, with the environment and the mesh that Accelerate's `ParallelismConfig` has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from drivetrain import accelerator as engine
from drivetrain.accelerator import TorchContextParallelConfig as EngineContextParallelConfig
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.parallel.mesh import MeshSizes, make_mesh

__all__ = ["ParallelismConfig"]

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_VARIABLE = "PARALLELISM_CONFIG_"


@dataclass
class TorchTensorParallelConfig:
    """Options of `ParallelismConfig(tp_handler=...)`."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig(EngineContextParallelConfig):
    """Options of `ParallelismConfig(cp_handler=...)`, from the environment where they are not given."""

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or os.environ.get(f"{_VARIABLE}CP_COMM_STRATEGY", "allgather")
        try:
            super().__post_init__()
        except ConfigurationError as error:
            raise ConfigurationError(f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. {error}") from error


@dataclass
class ParallelismConfig(engine.ParallelismConfig):
    """`drivetrain.ParallelismConfig`, whose sizes come from the environment where they are not given.

    Attributes:
        device_mesh: The mesh that `get_device_mesh` made; None before.
    """

    device_mesh = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) is None:
                setattr(self, name, int(os.environ.get(_VARIABLE + name.upper(), "1")))
        self.cp_backend = self.cp_backend or os.environ.get(f"{_VARIABLE}CP_BACKEND", "torch")
        self.sp_backend = self.sp_backend or os.environ.get(f"{_VARIABLE}SP_BACKEND", "deepspeed")
        super().__post_init__()
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()

    def _enabled(self, *names: str) -> list[str]:
        return [name for name in names if getattr(self, f"{name}_enabled")]

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions whose processes get different data."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions whose processes work on the same batch."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions over which the parameters are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions over which a loss is averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of FSDP, with those of its replicas."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions of more than one process."""
        return self.dp_dim_names + self.non_dp_dim_names

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        names = self._enabled("dp_replicate", "dp_shard", "cp", "sp", "tp")
        return (tuple(names), tuple(getattr(self, f"{name}_size") for name in names)) if names else ()

    def build_device_mesh(self, device_type: str) -> Any:
        """Make a mesh with these sizes, and its joint dimensions `dp`, `dp_shard_cp` and `dp_cp`.

        Args:
            device_type: The kind of device, such as `"cuda"`.

        Returns:
            The mesh; None if every size is 1.
        """
        sizes = {name: getattr(self, f"{name}_size") or 1 for name in ("dp_replicate", "dp_shard", "cp", "tp")}
        mesh = make_mesh(MeshSizes(**sizes), device_type)
        if mesh is None:
            return None
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joint.items():
            if parts:
                mesh[parts]._flatten(name)  # type: ignore[index]
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh, made on the first call.

        Args:
            device_type: The kind of device, which the first call must give.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError("There is no device mesh yet: pass device_type to get_device_mesh.")
            self.device_mesh = self.build_device_mesh(device_type)
        return self.device_mesh
