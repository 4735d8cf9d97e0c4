"""Running a prepared model's forward under its precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from drivetrain.accelerator.handlers import AutocastKwargs
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.nested import recursively_apply
from drivetrain.strategies.precision import Precision, overrides


def autocast_context(
    precision: Precision, kind: DeviceKind, options: AutocastKwargs | None
) -> AbstractContextManager[Any]:
    """The precision's context for computations outside a model.

    Args:
        precision: The number formats.
        kind: The kind of device.
        options: Those of this context alone; None takes the context of a forward.
    """
    if options is None:
        return precision.forward_context()
    return precision.autocast(kind, options.enabled, options.cache_enabled)


def under_precision(function: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """A function that runs in a precision's forward context; itself where the precision has none.

    Args:
        function: What computes.
        precision: The number formats.
    """
    if not overrides(precision, "forward_context"):
        return function

    def step_in_precision(*args: Any, **kwargs: Any) -> Any:
        with precision.forward_context():
            return function(*args, **kwargs)

    return step_in_precision


class PrecisionForward:
    """Takes the place of a module's `forward`: casts inputs, opens the precision's context, returns 32-bit outputs.

    Outputs come back in 32 bits under the mixed precisions, so that a loss outside the model is computed in full.

    Args:
        forward: The module's own forward.
        precision: The number formats.
    """

    def __init__(self, forward: Callable[..., Any], precision: Precision) -> None:
        self.forward = forward
        self.precision = precision
        self._casts_inputs = overrides(precision, "convert_batch")
        self._compute = under_precision(forward, precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._casts_inputs:
            args, kwargs = self.precision.convert_batch((args, kwargs))
            return self._compute(*args, **kwargs)
        return recursively_apply(torch.Tensor.float, self._compute(*args, **kwargs), test_type=_is_half)

    # Made again for a copy of the module, which is to compute with its own weights.

    def __reduce__(self) -> tuple[Any, ...]:
        return PrecisionForward, (self.forward, self.precision)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrecisionForward:
        return PrecisionForward(deepcopy(self.forward, memo), self.precision)

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Give a module its own forward back."""
        if isinstance(model.__dict__.get("forward"), PrecisionForward):
            del model.__dict__["forward"]


def wrap_forward(model: nn.Module, precision: Precision) -> None:
    """Let a module's forward run under a precision, and no longer under another one it was prepared for before."""
    wrapped = model.__dict__.get("forward")
    if isinstance(wrapped, PrecisionForward):
        if wrapped.precision is precision:
            return
        PrecisionForward.remove(model)
    if overrides(precision, "forward_context") or overrides(precision, "convert_batch"):
        model.__dict__["forward"] = PrecisionForward(model.forward, precision)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
