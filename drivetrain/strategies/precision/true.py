"""Precisions in which parameters, activations and gradients have one dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.strategies.precision.base import Precision


class TruePrecision(Precision):
    """Base class for precisions with one dtype for parameters and computation."""

    dtype: ClassVar[torch.dtype]
    # None leaves complex tensors unchanged: torch computes at least in complex64.
    complex_dtype: ClassVar[torch.dtype | None] = None

    def __init__(self) -> None:
        self.param_dtype = self.dtype
        self.reduce_dtype = self.dtype

    def convert(self, model: nn.Module) -> nn.Module:
        return model._apply(self._cast)  # type: ignore[no-untyped-call, no-any-return]

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        # `Module.to(dtype)` would keep the real part of a complex tensor only.
        if tensor.is_complex():
            return tensor if self.complex_dtype is None else tensor.to(self.complex_dtype)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def convert_batch(self, batch: Any) -> Any:
        return recursively_apply(self._cast, batch)

    def init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(self.dtype)


class Double(TruePrecision):
    """Precision with parameters, activations and gradients in float64."""

    name = "64"
    aliases = ("64-true", "fp64", "double")
    dtype = torch.float64
    complex_dtype = torch.complex128

    def setup(self, kind: DeviceKind) -> None:
        if kind.name == "mps":
            raise ConfigurationError(
                "precision='64' is not supported on mps devices, which have no 64-bit floats. Use '32' or the CPU."
            )


class BFloat16True(TruePrecision):
    """Precision with parameters and computation in bfloat16, without loss scaling."""

    name = "bf16-true"
    dtype = torch.bfloat16

    def setup(self, kind: DeviceKind) -> None:
        refuse_without_bf16(self.name, kind)


class Float16True(TruePrecision):
    """Precision with parameters and computation in float16, without loss scaling.

    Suited to inference, and to training if gradients stay within float16's range.
    """

    name = "fp16-true"
    aliases = ("16-true",)
    dtype = torch.float16


def refuse_without_bf16(name: str, kind: DeviceKind) -> None:
    """Raise a `ConfigurationError` if a device type cannot compute in bfloat16."""
    if not kind.supports_bf16():
        raise ConfigurationError(
            f"precision={name!r} needs bfloat16, which this machine's {kind.name} device does not support. "
            "Use 'fp16' or '32'.",
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
