"""`SingleDeviceCollective`: a process group of one process."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.fabric.plugins.collectives.collective import Collective

__all__ = ["SingleDeviceCollective"]


class SingleDeviceCollective(Collective):
    """Collective operations for one process, which return their input."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        pass

    @classmethod
    def new_group(cls, **kwargs: Any) -> object:
        return object()

    @classmethod
    def destroy_group(cls, group: object) -> None:
        pass

    def broadcast(self, tensor: Any, src: int = 0) -> Any:
        return tensor

    def all_reduce(self, tensor: Any, op: Any = "sum") -> Any:
        return tensor

    def reduce(self, tensor: Any, dst: int = 0, op: Any = "sum") -> Any:
        return tensor

    def all_gather(self, tensor_list: list[Any], tensor: Any) -> list[Any]:
        return [tensor]

    def gather(self, tensor: Any, gather_list: list[Any], dst: int = 0) -> list[Any]:
        return [tensor]

    def scatter(self, tensor: Any, scatter_list: list[Any], src: int = 0) -> Any:
        return scatter_list[0]

    def reduce_scatter(self, output: Any, input_list: list[Any], op: Any = "sum") -> Any:
        return input_list[0]

    def all_to_all(self, output_tensor_list: list[Any], input_tensor_list: list[Any]) -> list[Any]:
        return input_tensor_list

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        pass

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Any:
        return tensor

    def barrier(self, device_ids: list[int] | None = None) -> None:
        pass
