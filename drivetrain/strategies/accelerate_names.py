"""What Accelerate calls a strategy, for scripts that ask."""

from __future__ import annotations

from drivetrain.runtime.state import DistributedType
from drivetrain.strategies.base import Strategy

_TYPES = {
    "fsdp": DistributedType.FSDP,
    "deepspeed": DistributedType.DEEPSPEED,
    "megatron": DistributedType.MEGATRON_LM,
    "xla": DistributedType.XLA,
}


def distributed_type_of(strategy: Strategy, processes: DistributedType) -> DistributedType:
    """How a run is spread, in Accelerate's words.

    Args:
        strategy: What places its models; one that derives from another is called as that one.
        processes: How its processes are spread.
    """
    names = [getattr(kind, "name", None) for kind in type(strategy).__mro__]
    return next((_TYPES[name] for name in names if name in _TYPES), processes)


def is_fully_sharded(strategy: Strategy) -> bool:
    """Whether parameters are sharded by torch's `fully_shard`."""
    return distributed_type_of(strategy, DistributedType.NO) is DistributedType.FSDP


def grid_rank(strategy: Strategy, dimension: str) -> int:
    """This process's index along one dimension of a grid of processes; without a grid all are replicas.

    Args:
        strategy: What places its models.
        dimension: `"dp_replicate"`, `"dp_shard"`, `"cp"`, `"tp"` or `"pp"`.
    """
    place = getattr(strategy, "place_in_mesh", None)
    if place is None:
        return strategy.topology.data_shard.index if dimension == "dp_replicate" else 0
    index: int = place.coordinates()[dimension]
    return index
