"""`Collective`: the operations of a group of processes, for code that makes groups of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import CollectiveError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Collective"]


class Collective(ABC):
    """A group of processes: `setup`, `create_group`, then the operations, then `teardown`.

    Operations return what they have filled.
    """

    def __init__(self) -> None:
        self._group: Any = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process in the group."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of processes in the group."""

    @property
    def group(self) -> Any:
        """The group."""
        if self._group is None:
            raise CollectiveError(f"`{type(self).__name__}` does not own a group. Call create_group() first.")
        return self._group

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether groups can be made here."""

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool:
        """Whether the group of all processes is there."""

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Make the group of all processes."""

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Make a group of some processes; called by all."""

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Any) -> None:
        """End a group."""

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        """The operation of a name."""
        return op

    def setup(self, **kwargs: Any) -> Self:
        """Make the group of all processes, unless it is there."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Make this object's group."""
        if self._group is not None:
            raise CollectiveError(f"`{type(self).__name__}` already owns a group. Call teardown() first.")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """End this object's group."""
        self.destroy_group(self.group)
        self._group = None
        return self

    @abstractmethod
    def broadcast(self, tensor: Any, src: int) -> Any:
        """Give all processes one process's tensor."""

    @abstractmethod
    def all_reduce(self, tensor: Any, op: Any) -> Any:
        """Reduce tensors, on all processes."""

    @abstractmethod
    def reduce(self, tensor: Any, dst: int, op: Any) -> Any:
        """Reduce tensors, on one process."""

    @abstractmethod
    def all_gather(self, tensor_list: list[Any], tensor: Any) -> list[Any]:
        """Gather tensors, on all processes."""

    @abstractmethod
    def gather(self, tensor: Any, gather_list: list[Any], dst: int = 0) -> list[Any]:
        """Gather tensors, on one process."""

    @abstractmethod
    def scatter(self, tensor: Any, scatter_list: list[Any], src: int = 0) -> Any:
        """Give each process one of the tensors that one process has."""

    @abstractmethod
    def reduce_scatter(self, output: Any, input_list: list[Any], op: Any) -> Any:
        """Reduce lists of tensors, and give each process one of the results."""

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Any], input_tensor_list: list[Any]) -> list[Any]:
        """Give each process its tensor of each other process's list."""

    @abstractmethod
    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send a tensor to one process."""

    @abstractmethod
    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Any:
        """Receive a tensor from one process, or from any."""

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait for all processes of the group."""
