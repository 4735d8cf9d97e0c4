"""`TorchCollective`: a group of `torch.distributed`."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.compat.lightning.fabric.plugins.collectives.collective import Collective
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchCollective"]


class TorchCollective(Collective):
    """The operations of `torch.distributed` on a group; the group of all processes where none was created.

    Raises:
        RuntimeError: torch was built without `torch.distributed`.

    Attributes:
        manages_default_group: Whether `setup` has made the group of all processes, which the last `teardown` ends.
    """

    manages_default_group: ClassVar[bool] = False

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("TorchCollective needs torch.distributed, without which this torch was built.")
        super().__init__()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = dist.group.WORLD
        return super().group

    @classmethod
    def is_available(cls) -> bool:
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        dist.init_process_group(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        if group in _groups():  # not on processes that are not in it
            dist.destroy_process_group(group)

    def setup(self, main_address: str | None = None, main_port: str | int | None = None, **kwargs: Any) -> Self:
        """Make the group of all processes, unless it is there.

        Args:
            main_address: The address of the first process; `MASTER_ADDR` if None.
            main_port: Its port; `MASTER_PORT` if None.
            **kwargs: For `torch.distributed.init_process_group`.
        """
        if self.is_initialized():
            return self
        with _variables(MASTER_ADDR=main_address, MASTER_PORT=main_port):
            super().setup(**kwargs)
        TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> Self:
        """End this object's group, and after the last one that of all processes, where `setup` has made it."""
        is_member = self.group != dist.GroupMember.NON_GROUP_MEMBER
        super().teardown()
        if TorchCollective.manages_default_group and is_member:
            whole = dist.group.WORLD
            if whole is not None and len(_groups()) == 1:
                self.destroy_group(whole)
            TorchCollective.manages_default_group = len(_groups()) > 0
        return self

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
        """Wait for all processes of the group, and name those that do not come.

        Args:
            timeout: How long to wait.
            wait_all_ranks: Whether to name all of them, not the first one alone.
        """
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        """Gather objects that can be pickled, on all processes."""
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        """Give all processes one process's objects."""
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        """Gather objects, on one process."""
        dist.gather_object(obj, object_gather_list, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        """Give each process one of the objects that one process has."""
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        """The operation of a name.

        Raises:
            ConfigurationError: There is none of that name, or it is no name.
        """
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return op
        if not isinstance(op, str):
            raise ConfigurationError(f"Unsupported op {op!r} of type {type(op).__name__}. Give a name, such as 'sum'.")
        found = getattr(dist.ReduceOp, op.upper(), None)
        if found is None:
            raise ConfigurationError(f"op {op.upper()!r} is not a member of `ReduceOp`. Give a name such as 'sum'.")
        return found


def _groups() -> Any:
    """All groups that this process is in."""
    return dist.distributed_c10d._pg_map


@contextmanager
def _variables(**values: str | int | None) -> Iterator[None]:
    """Set those environment variables in the body that have a value."""
    before = {name: os.environ.get(name) for name, value in values.items() if value is not None}
    os.environ.update({name: str(values[name]) for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
