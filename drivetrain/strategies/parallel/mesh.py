"""Device mesh: the number of processes along each dimension, and the coordinates of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from drivetrain.data.configuration import DataShard
from drivetrain.runtime.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Outermost first. Tensor parallelism communicates most, so its ranks must be neighbours, which share a machine.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
REST = -1


@dataclass(frozen=True)
class MeshSizes:
    """Number of processes along each dimension of the device mesh.

    A `dp_shard` of -1 stands for all processes that the other sizes leave over.
    """

    dp_replicate: int = 1
    dp_shard: int = REST
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            rest = field.name == "dp_shard" and size == REST
            if not (isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or rest)):
                allowed = "a whole number of processes, at least 1" + (", or -1" if field.name == "dp_shard" else "")
                raise ConfigurationError(f"{field.name} must be {allowed}, got {size!r}.")

    def fill(self, world_size: int) -> MeshSizes:
        # Replaces -1 by the number of processes that the other sizes leave over.
        others = prod(getattr(self, name) for name in DIMENSIONS if not (name == "dp_shard" and self.dp_shard == REST))
        asked = " x ".join(
            f"{name}={getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) not in (1, REST)
        )
        if self.dp_shard == REST:
            if world_size % others:
                raise ConfigurationError(
                    f"{asked} needs a multiple of {others} processes, but there are {world_size}. Start another "
                    "number of processes, or choose sizes that divide this number.",
                )
            return replace(self, dp_shard=world_size // others)
        if others != world_size:
            raise ConfigurationError(
                f"{asked or 'Parallel()'} multiplies to {others}, but there are {world_size} processes. Start "
                f"{others} processes, change a size, or pass dp_shard=-1 to use all that are left.",
            )
        return self

    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the mesh dimensions as a tuple.

        The order is `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp`.
        """
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MeshSizes:
        """Create mesh sizes from a mapping such as `{"tp_size": 2}`.

        Values of None are skipped, and `dp_shard` is 1 if the mapping has no such key.
        """
        own = {field.name for field in fields(cls)}
        names = {**{name: name for name in own}, **{f"{name}_size": name for name in own}}
        sizes: dict[str, int] = {"dp_shard": 1}
        for key, value in config.items():
            plain = key.removeprefix("parallelism_config_")
            if plain not in names:
                allowed = sorted(f"{name}_size" for name in own)
                raise ConfigurationError(
                    f"Unknown size {key!r} in a parallelism config. Allowed: "
                    f"{', '.join(allowed)}.{nearest(plain, allowed)}",
                )
            if value is not None:
                sizes[names[plain]] = value
        return cls(**sizes)


@dataclass(frozen=True)
class MeshPlace:
    """A rank's position in the device mesh, from which its coordinates and its data shard are computed."""

    sizes: MeshSizes  # processes along each dimension
    rank: int
    loss_index: int | None = None  # along `pp`, of the processes that compute losses; None is the last

    def coordinates(self) -> dict[str, int]:
        """Return the rank's index along each dimension of the device mesh."""
        # The last dimension varies fastest, so the rank is taken apart from the innermost dimension outwards.
        found, rest = {}, self.rank
        for name, size in reversed(list(zip(DIMENSIONS, self.sizes.shape(), strict=True))):
            rest, found[name] = divmod(rest, size)
        return found

    def rank_of(self, **coordinates: int) -> int:
        # Missing coordinates are those of this process.
        at, rank = {**self.coordinates(), **coordinates}, 0
        for name, size in zip(DIMENSIONS, self.sizes.shape(), strict=True):
            rank = rank * size + at[name]
        return rank

    @property
    def _last(self) -> int:
        return self.sizes.pp - 1 if self.loss_index is None else self.loss_index

    @property
    def loss_rank(self) -> int:
        """Global rank of the process in this rank's pipeline that computes the loss."""
        return self.rank_of(pp=self._last)

    @property
    def data_shard(self) -> DataShard:
        """Index of this process's shard of the dataset, and the number of shards.

        Ranks that differ only along `pp`, `cp` or `tp` share batches, so they get equal shards.
        """
        at = self.coordinates()
        count = self.sizes.dp_replicate * self.sizes.dp_shard
        return DataShard(at["dp_replicate"] * self.sizes.dp_shard + at["dp_shard"], count, is_common=count == 1)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        # One for each shard of the dataset: the process that computes losses and has index 0 along `cp` and `tp`.
        last = self._last
        shards = product(range(self.sizes.dp_replicate), range(self.sizes.dp_shard))
        return tuple(self.rank_of(pp=last, dp_replicate=r, dp_shard=s, cp=0, tp=0) for r, s in shards)

    @property
    def value_ranks(self) -> tuple[int, ...]:
        # Together, these ranks process the global batch exactly once. Each context-parallel part of a sequence counts.
        # Tensor-parallel copies do not.
        last = self._last
        parts = product(range(self.sizes.dp_replicate), range(self.sizes.dp_shard), range(self.sizes.cp))
        return tuple(self.rank_of(pp=last, dp_replicate=r, dp_shard=s, cp=c, tp=0) for r, s, c in parts)


def make_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh | None:
    """Create the device mesh, or return None if every size is 1.

    A collective call, because it creates process groups.
    """
    from torch.distributed.device_mesh import init_device_mesh

    dimensions = {name: size for name, size in zip(DIMENSIONS, sizes.shape(), strict=True) if size > 1}
    if "dp_replicate" in dimensions:  # `fully_shard` needs a shard dimension next to a replicate one, even of size 1
        dimensions = {name: getattr(sizes, name) for name in DIMENSIONS if name in {*dimensions, "dp_shard"}}
    if not dimensions:
        return None
    return init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def submesh(mesh: DeviceMesh | None, *names: str) -> DeviceMesh | None:
    # Flattens the named dimensions to one. None if the mesh has none of them.
    present = tuple(name for name in names if mesh is not None and name in (mesh.mesh_dim_names or ()))
    if mesh is None or not present:
        return None
    part = mesh[present if len(present) > 1 else present[0]]
    return part._flatten("_".join(present)) if len(present) > 1 else part
