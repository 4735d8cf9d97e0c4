"""`DeviceMesh`: the devices of one process as a grid, and which dimension of a tensor is sharded over which axis."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.errors import ConfigurationError

DATA, SHARD, TENSOR = "data", "fsdp", "tensor"
REST = -1
"""As many devices as the other axes leave."""

Spec = tuple[Any, ...]
"""For each dimension of a tensor, the axis or axes that it is sharded over; None where it is whole."""


_SPEC = "_drivetrain_xla_spec"


@dataclass(frozen=True)
class MeshShape:
    """How many devices each axis has.

    Args:
        data: Copies of the parameters, each for other rows of a batch.
        shard: Devices over which parameters are sharded, each for other rows of a batch.
        tensor: Devices that share the computation of layers.

    Raises:
        ConfigurationError: A size cannot be.
    """

    data: int = REST
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != REST):
                raise ConfigurationError(
                    f"The size of {name} must be a whole number of at least 1, got {value!r}.", code="DT-002"
                )
        if [*vars(self).values()].count(REST) > 1:
            raise ConfigurationError(
                f"Only one size can be {REST}, all devices that are left; got {self}.", code="DT-004"
            )

    @property
    def size(self) -> int:
        """Devices altogether."""
        return self.data * self.shard * self.tensor

    def fill(self, devices: int) -> MeshShape:
        """The shape with the size that was left open.

        Args:
            devices: How many there are.

        Raises:
            ConfigurationError: The sizes do not multiply to that number.
        """
        sizes = dict(vars(self))
        open_axis = next((name for name, value in sizes.items() if value == REST), None)
        given = 1
        for value in sizes.values():
            given *= 1 if value == REST else value
        if open_axis is not None and devices % given == 0:
            return replace(self, **{open_axis: devices // given})
        if open_axis is None and given == devices:
            return self
        divisors = [number for number in range(1, devices + 1) if devices % number == 0]
        raise ConfigurationError(
            f"data={self.data}, shard={self.shard} and tensor={self.tensor} do not multiply to the {devices} XLA "
            f"device(s) of this process. Sizes that fit: {', '.join(map(str, divisors))}; {REST} takes what is left.",
            code="DT-041",
        )


class DeviceMesh:
    """A grid over all devices of this process.

    Args:
        shape: The size of each axis, none left open.
    """

    def __init__(self, shape: MeshShape) -> None:
        self.shape = shape
        self._sharding = importlib.import_module("torch_xla.distributed.spmd")

    @cached_property
    def mesh(self) -> Any:
        """As torch_xla's functions take it."""
        shape = self.shape
        return self._sharding.Mesh(range(shape.size), (shape.data, shape.shard, shape.tensor), (DATA, SHARD, TENSOR))

    def shard(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Spread a tensor over the devices, in place; a batch that its user has spread already stays as it is.

        Args:
            tensor: On the XLA device.
            spec: For each of its dimensions the axis, or None.
        """
        if not any(axes is not None for axes in spec):
            return
        if not self.is_spread(tensor):
            self._sharding.mark_sharding(tensor, self.mesh, spec)

    def shard_parameter(self, parameter: nn.Parameter, spec: Spec) -> None:
        """Spread a parameter as wanted, however it was spread before.

        Args:
            parameter: On the XLA device.
            spec: For each of its dimensions the axis, or None.
        """
        if self.is_spread(parameter):
            self._sharding.clear_sharding(parameter)
            self._sharding.mark_sharding(parameter, self.mesh, spec)
        else:
            self.shard(parameter, spec)
        setattr(parameter, _SPEC, spec)  # an attribute, since weak references keep parameters from being moved

    def shard_rows(self, tensor: torch.Tensor) -> None:
        """Spread a tensor's first dimension over the devices that take rows of a batch."""
        if tensor.dim() and self.shape.data * self.shape.shard > 1:
            self.shard(tensor, ((DATA, SHARD), *[None] * (tensor.dim() - 1)))

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        """Spread a tensor as a parameter of the same shape was by `shard_parameter`."""
        self.shard(tensor, getattr(parameter, _SPEC, (None,) * tensor.dim()))

    @staticmethod
    def is_spread(tensor: torch.Tensor) -> bool:
        """Whether devices hold different parts of a tensor."""
        return DeviceMesh.spec_of(tensor) not in ("", "{replicated}")

    @staticmethod
    def spec_of(tensor: torch.Tensor) -> str:
        """XLA's own description of how a tensor is spread; empty where it is not."""
        package = importlib.import_module("torch_xla")
        return str(package._XLAC._get_xla_sharding_spec(tensor))


def shard_spec(shape: Sequence[int], devices: int, taken: Spec | None = None) -> Spec:
    """How a parameter is sharded: its largest dimension that is a multiple of the devices, else its largest.

    Args:
        shape: The parameter's.
        devices: Over how many it is sharded.
        taken: Axes that shard it already, for tensor parallelism.
    """
    spec = list(taken or [None] * len(shape))
    free = [dim for dim, axis in enumerate(spec) if axis is None]
    if devices == 1 or not free:
        return tuple(spec)
    best = max(free, key=lambda dim: (shape[dim] % devices == 0, shape[dim]))
    if shape[best] >= devices:
        spec[best] = SHARD
    return tuple(spec)
