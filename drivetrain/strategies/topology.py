"""`Topology`: this process's place among those of a run, and which processes count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from drivetrain.data.configuration import DataShard
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.nested import send_to_device

if TYPE_CHECKING:
    from drivetrain.runtime.state import PartialState

Value = TypeVar("Value")


@dataclass(frozen=True)
class Topology:
    """Which share of the data and of the model is this process's, and which processes' results count.

    Args:
        environment: This process among its peers.
        kind: The kind of device that it computes on.
        device: Where its tensors live.
        data_shard: Which slice of the data it loads: not its rank where several processes share a batch.
        data_ranks: For each data shard, in their order, the rank whose rows stand for it; None where every rank does.
        value_ranks: The ranks whose logged values together are those of the global batch, each counted once; None
            where all are.
        averaging_processes: Over how many processes gradients are averaged; the data shards if None.
        stage_group: The processes that compute parts of one forward, as the stages of a pipeline do; None where each
            process computes all of it.
        loss_rank: The rank in that group that computes losses.
    """

    environment: ProcessEnvironment
    kind: DeviceKind
    device: torch.device
    data_shard: DataShard
    data_ranks: tuple[int, ...] | None = None
    value_ranks: tuple[int, ...] | None = None
    averaging_processes: int = 1
    stage_group: dist.ProcessGroup | None = None
    loss_rank: int | None = None

    @classmethod
    def data_parallel(cls, state: PartialState) -> Topology:
        """Every process loads a shard of the data of its own and computes the whole model.

        Args:
            state: This process, its device and its peers.
        """
        count = state.num_processes
        shard = DataShard(state.process_index, count)
        return cls(state.environment, state.kind, state.device, shard, averaging_processes=count)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.environment.rank

    @property
    def computes_loss(self) -> bool:
        """Whether this process runs the task's steps to their end, rather than a part of the model only."""
        return self.loss_rank is None or self.loss_rank == self.rank

    @property
    def counts_rows(self) -> bool:
        """Whether this process's rows of a batch count: not where they repeat a peer's."""
        return self.data_ranks is None or self.rank in self.data_ranks

    @property
    def counts_values(self) -> bool:
        """Whether this process's logged values count: not where they repeat a peer's."""
        return self.value_ranks is None or self.rank in self.value_ranks

    @property
    def value_place(self) -> tuple[int, int]:
        """This process's number among those whose values count, and how many those are.

        A process whose values do not count has the number of its data shard.
        """
        if self.value_ranks is None:
            return self.rank, self.environment.world_size
        index = self.value_ranks.index(self.rank) if self.counts_values else self.data_shard.index
        return index, len(self.value_ranks)

    def select(self, per_rank: Sequence[Value], rows: bool = False) -> list[Value]:
        """Those of the values of all processes that count, in the order of the data.

        Args:
            per_rank: A value of each process, in the order of the ranks.
            rows: Whether they are rows of the data, which processes that share a sequence hold copies of, rather than
                values computed from each process's part of it.
        """
        ranks = self.data_ranks if rows else self.value_ranks
        return list(per_rank) if ranks is None else [per_rank[rank] for rank in ranks]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the processes whose values count, the same on all; call it on all."""
        total: torch.Tensor = reduce(tensor if self.counts_values else torch.zeros_like(tensor), "sum")
        return total

    def share(self, result: Any) -> Any:
        """What the process that computes the loss passes, on every process that computes another part of the model."""
        if self.stage_group is None:
            return result
        assert self.loss_rank is not None
        boxed = [send_to_device(result, torch.device("cpu")) if self.computes_loss else None]
        dist.broadcast_object_list(boxed, src=self.loss_rank, group=self.stage_group, device=self.device)
        return result if self.computes_loss else boxed[0]
