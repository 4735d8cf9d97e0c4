"""The mesh that parameters are sharded over, made when it is needed first."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.topology import Topology


class ShardMesh:
    """All processes, in copies of a sharded model: called, it returns the mesh (shard,) or (replicate, shard).

    Args:
        topology: This process's place.
        copies: Copies of the sharded model.

    Raises:
        ConfigurationError: The number of processes is no multiple of the copies.
    """

    def __init__(self, topology: Topology, copies: int) -> None:
        world = topology.environment.world_size
        if world % copies:
            raise ConfigurationError(
                f"replicate_size={copies} does not divide the {world} processes of this run. "
                f"Allowed: {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}.",
                code="DT-041",
            )
        self._topology, self._copies = topology, copies
        self._mesh: DeviceMesh | None = None
        self._own_group = False

    def __call__(self) -> DeviceMesh:
        if self._mesh is None:
            self._ensure_group()
            self._mesh = self._make()
        return self._mesh

    def _ensure_group(self) -> None:
        """Make a group of this process alone where there is none: a mesh needs one nevertheless."""
        if not dist.is_initialized():
            kind = self._topology.kind
            backend = "gloo" if kind.name == "cpu" else f"cpu:gloo,{kind.name}:{kind.backend}"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._own_group = True

    def _make(self) -> DeviceMesh:
        shards = self._topology.environment.world_size // self._copies
        device = self._topology.device.type
        if self._copies == 1:
            return init_device_mesh(device, (shards,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(device, (self._copies, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    def leave(self) -> None:
        """Leave the group that a world of one made for its mesh."""
        self._mesh = None
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False
