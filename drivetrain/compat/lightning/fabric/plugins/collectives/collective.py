"""`Collective`: abstract operations of a process group that the script creates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import CollectiveError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Collective"]


class Collective(ABC):
    """A process group. Call `setup`, `create_group`, then the operations, then `teardown`.

    Operations return the tensor or list that they write to.
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
        """The process group. Raises `CollectiveError` before `create_group`."""
        if self._group is None:
            raise CollectiveError(f"`{type(self).__name__}` does not own a group. Call create_group() first.")
        return self._group

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Return True if process groups can be created here."""

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool:
        """Return True if the default process group exists."""

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Create the default process group."""

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Create a process group of some ranks. Call it on all processes."""

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Any) -> None:
        """Destroy a process group."""

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        """Convert the name of a reduction to the backend's operation."""
        return op

    def setup(self, **kwargs: Any) -> Self:
        """Create the default process group, unless it exists."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Create this object's process group. Raise `CollectiveError` if it has one."""
        if self._group is not None:
            raise CollectiveError(f"`{type(self).__name__}` already owns a group. Call teardown() first.")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Destroy this object's process group."""
        self.destroy_group(self.group)
        self._group = None
        return self

    @abstractmethod
    def broadcast(self, tensor: Any, src: int) -> Any:
        """Send a tensor from one rank to all."""

    @abstractmethod
    def all_reduce(self, tensor: Any, op: Any) -> Any:
        """Reduce a tensor across all ranks. Every rank gets the result."""

    @abstractmethod
    def reduce(self, tensor: Any, dst: int, op: Any) -> Any:
        """Reduce a tensor across all ranks. Only rank `dst` gets the result."""

    @abstractmethod
    def all_gather(self, tensor_list: list[Any], tensor: Any) -> list[Any]:
        """Gather a tensor from all ranks into a list on every rank."""

    @abstractmethod
    def gather(self, tensor: Any, gather_list: list[Any], dst: int = 0) -> list[Any]:
        """Gather a tensor from all ranks into a list on rank `dst`."""

    @abstractmethod
    def scatter(self, tensor: Any, scatter_list: list[Any], src: int = 0) -> Any:
        """Send each rank one tensor of a list on rank `src`."""

    @abstractmethod
    def reduce_scatter(self, output: Any, input_list: list[Any], op: Any) -> Any:
        """Reduce lists of tensors across ranks. Each rank gets one element of the result."""

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Any], input_tensor_list: list[Any]) -> list[Any]:
        """Exchange tensors: rank i receives element i of every rank's list."""

    @abstractmethod
    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send a tensor to rank `dst`."""

    @abstractmethod
    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Any:
        """Receive a tensor from rank `src`, or from any rank if None."""

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Block until all ranks of the group reach this call."""
