"""Methods of `torch.distributed` bound to a process group, and a gather that keeps gradients."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.errors import ConfigurationError


def gather_with_gradients(tensor: Tensor) -> Tensor:
    """Stack the tensors of all ranks, so that gradients flow back to each rank."""
    from torch.distributed.nn.functional import all_gather

    return torch.stack(all_gather(tensor))  # type: ignore[no-untyped-call]


class TorchGroup:
    """Base class that offers functions of `torch.distributed` as methods, for one process group."""

    group: Any

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    @classmethod
    def is_available(cls) -> bool:
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, main_address: str | None = None, main_port: str | int | None = None, **kwargs: Any) -> None:
        """Initialize the default process group at the given address."""
        # init_process_group reads the address from the environment, which is restored afterwards.
        before = dict(os.environ)
        wanted = {"MASTER_ADDR": main_address, "MASTER_PORT": main_port}
        given = {name: str(value) for name, value in wanted.items() if value is not None}
        os.environ.update(given)
        try:
            dist.init_process_group(**kwargs)
        finally:
            for name in given:
                del os.environ[name]
            os.environ.update({name: before[name] for name in given if name in before})

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        # Destroying a group twice raises an error, and torch has no public way to check for it.
        if group in dist.distributed_c10d._pg_map:
            dist.destroy_process_group(group)

    @classmethod
    def whole(cls) -> Any:
        # None if there is no default process group.
        return dist.group.WORLD

    @classmethod
    def count(cls) -> int:
        """Return the number of process groups that this process has created and not destroyed."""
        return len(dist.distributed_c10d._pg_map)

    @classmethod
    def is_member(cls, group: Any) -> bool:
        # new_group returns this marker on ranks outside the new group.
        return bool(group != dist.GroupMember.NON_GROUP_MEMBER)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        dist.all_reduce(tensor, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor:
        dist.reduce(tensor, dst, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        dist.gather(tensor, gather_list, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        dist.scatter(tensor, scatter_list, src, group=self.group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor:
        dist.reduce_scatter(output, input_list, op=self._convert_to_native_op(op), group=self.group)
        return output

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        dist.send(tensor, dst, tag=tag, group=self.group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        dist.recv(tensor, src, tag=tag, group=self.group)
        return tensor

    def barrier(self, device_ids: list[int] | None = None) -> None:
        dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        dist.gather_object(obj, object_gather_list, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return op
        if not isinstance(op, str):
            raise ConfigurationError(f"Unsupported op {op!r} of type {type(op).__name__}. Use a name, such as 'sum'.")
        found = getattr(dist.ReduceOp, op.upper(), None)
        if found is None:
            raise ConfigurationError(f"op {op.upper()!r} is not a member of `ReduceOp`. Use a name such as 'sum'.")
        return found
