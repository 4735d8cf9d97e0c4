"""`ParallelismConfig` with Accelerate's environment variables and device mesh."""

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
    """Options of `ParallelismConfig(cp_handler=...)`. Environment variables give the defaults."""

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or os.environ.get(f"{_VARIABLE}CP_COMM_STRATEGY", "allgather")
        try:
            super().__post_init__()
        except ConfigurationError as error:
            raise ConfigurationError(f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. {error}") from error


@dataclass
class ParallelismConfig(engine.ParallelismConfig):
    """`drivetrain.ParallelismConfig` whose default sizes come from environment variables.

    Attributes:
        device_mesh: The mesh that `get_device_mesh` created, or None before.
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
        """Mesh dimensions whose ranks get different data."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Mesh dimensions whose ranks process the same batch."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Mesh dimensions over which parameters are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Mesh dimensions over which the loss is averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Mesh dimensions of FSDP: replicas and shards."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Mesh dimensions with more than one process."""
        return self.dp_dim_names + self.non_dp_dim_names

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        names = self._enabled("dp_replicate", "dp_shard", "cp", "sp", "tp")
        return (tuple(names), tuple(getattr(self, f"{name}_size") for name in names)) if names else ()

    def build_device_mesh(self, device_type: str) -> Any:
        """Create a device mesh with these sizes and the flattened dimensions `dp`, `dp_shard_cp` and `dp_cp`.

        Args:
            device_type: Device type, such as `"cuda"`.

        Returns:
            The mesh, or None if all sizes are 1.
        """
        sizes = {name: getattr(self, f"{name}_size") or 1 for name in ("dp_replicate", "dp_shard", "cp", "tp")}
        mesh = make_mesh(MeshSizes(**sizes), device_type)
        if mesh is None:
            return None
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joint.items():
            if parts:
                mesh[parts]._flatten(name)  # type: ignore[index]
        names = tuple(name for name in mesh.mesh_dim_names or () if sizes[name] > 1)
        return mesh if names == mesh.mesh_dim_names else mesh[names]

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the device mesh, which the first call creates.

        Args:
            device_type: Device type, required on the first call.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError("There is no device mesh yet: pass device_type to get_device_mesh.")
            self.device_mesh = self.build_device_mesh(device_type)
        return self.device_mesh
