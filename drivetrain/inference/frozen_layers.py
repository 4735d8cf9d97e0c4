"""Linear layers that are not trained, and whose packed weights strategies leave whole or shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.inference.quantization.base import Quantizer, bind_weight, weight_parts
from drivetrain.inference.sizes import parameter_size

_ALIGNED = 16  # bytes at whose multiples the parts of a packed weight begin

Bind = Callable[[nn.Module, Mapping[str, Tensor]], None]


class _Part(NamedTuple):
    """Where a tensor is among the bytes of a packed weight."""

    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.dtype.itemsize * math.prod(self.shape)


class FrozenLinear(nn.Module):
    """A layer that is not trained, quantised or not. It follows the inputs to their device.

    The layer is no submodule: a state dict does not hold it, and changes of dtype leave what is packed in it alone.

    Args:
        base: The layer, with `in_features` and `out_features`.
        quantizer: What has quantised the layer; None for one that is not quantised.
        sharded: Whether strategies may shard the weight. Its bytes are then the parameter `packed`, which no precision
            converts; without, every process holds the layer whole.

    Attributes:
        base: The frozen layer.
        packed: The bytes of the weight, shape `(bytes,)`, where strategies may shard them.
        frozen_size: Elements of the frozen layer's parameters before it was quantised, and the bytes that they take.
    """

    base: nn.Module
    packed: nn.Parameter | None
    frozen_size: tuple[int, int]

    def __init__(self, base: Any, quantizer: Quantizer | None = None, sharded: bool = False) -> None:
        nn.Module.__init__(self)
        self.__dict__["base"] = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base_device = next(iter(_tensors(base))).device
        sizes = [parameter_size(base, name, held.numel()) for name, held in base.named_parameters(recurse=False)]
        self.frozen_size = sum(elements for elements, _ in sizes), sum(nbytes for _, nbytes in sizes)
        self._parts: dict[str, _Part] = {}
        self._bind: Bind = bind_weight if quantizer is None else quantizer.bind
        if quantizer is not None:
            quantizer.settle(base)
        self.register_parameter("packed", None)
        if sharded:
            self._pack(weight_parts(base) if quantizer is None else quantizer.parts(base))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer.

        Args:
            x: Shape `(..., in_features)`.
        """
        if x.device != self._base_device:
            self.base.to(x.device)
            self._base_device = x.device
        if self.packed is None:
            output: Tensor = self.base(x)
            return output
        # Gathered for this forward, and freed after it. What autograd keeps are views of the same memory, which is
        # filled again before backward.
        self._bind(self.base, {name: _view(self.packed, part) for name, part in self._parts.items()})
        try:
            output = self.base(x)
        finally:
            self._unbind()
        return output

    def train(self, mode: bool = True) -> FrozenLinear:
        """Switch to training or evaluation, the frozen layer too."""
        self.base.train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.base).__name__}({self.in_features}, {self.out_features})"

    def _pack(self, parts: Mapping[str, Tensor]) -> None:
        end = 0
        for name, tensor in parts.items():
            self._parts[name] = _Part(end, tensor.dtype, tensor.shape)
            end = math.ceil(self._parts[name].end / _ALIGNED) * _ALIGNED
        packed = torch.zeros(end, dtype=torch.uint8, device=self._base_device)
        for name, tensor in parts.items():
            _view(packed, self._parts[name]).copy_(tensor)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self._unbind()

    def _unbind(self) -> None:
        """Let the layer hold one element in the place of each part, of the same shape."""
        empty = {
            name: torch.empty(1, dtype=part.dtype, device=self._base_device).expand(part.shape)
            for name, part in self._parts.items()
        }
        self._bind(self.base, empty)


def _view(packed: Tensor, part: _Part) -> Tensor:
    return packed.detach()[part.start : part.end].view(part.dtype).view(part.shape)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
