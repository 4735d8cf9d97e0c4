"""Number formats as Lightning's plugins: `Trainer(plugins=...)` takes them for the name of a precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_deprecation
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import recursively_apply

DTYPES = {"64-true": torch.float64, "32-true": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}
"""The dtype of parameters and of the computation, of number formats that have one for both."""


class Precision:
    """A number format; a run takes no more of it than its name, the methods are for scripts that call them.

    Attributes:
        precision: Its name, as `Trainer(precision=...)` takes it.
    """

    precision: str = "32-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with parameters and buffers in this number format.

        Args:
            module: The module, which is changed.
        """
        dtype = DTYPES.get(self.precision)
        return module if dtype in (None, torch.float32) else module.to(dtype)

    def convert_input(self, data: Any) -> Any:
        """Return a batch whose floating-point tensors have the dtype of the computation.

        Args:
            data: The batch, in any structure.
        """
        return _converted(data, DTYPES.get(self.precision, torch.float32))

    def convert_output(self, data: Any) -> Any:
        """Return what a model has computed, its floating-point tensors in torch's default dtype.

        Args:
            data: The output, in any structure.
        """
        return _converted(data, torch.get_default_dtype())

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Make floating-point tensors in the body with the dtype of parameters, unless they are given one."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES.get(self.precision, before))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def module_init_context(self) -> AbstractContextManager[None]:
        """Make modules in the body with parameters of this number format."""
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """What a forward runs in."""
        return self.tensor_init_context()


class MixedPrecision(Precision):
    """Autocast.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device: Of `forward_context`; a run takes its own.
        scaler: Taken for Lightning's sake; one is made where it is needed.
    """

    def __init__(self, precision: str, device: str | None = None, scaler: Any = None) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ConfigurationError(
                f"Passed `{type(self).__name__}({precision=})`. Precision must be '16-mixed' or 'bf16-mixed'."
            )
        self.precision, self.scaler = precision, scaler
        self.device = "cpu" if device is None else device

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, on the device that was given."""
        return torch.autocast(self.device, torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16)


class HalfPrecision(Precision):
    """Parameters in half precision.

    Args:
        precision: `"16-true"` or `"bf16-true"`.
    """

    def __init__(self, precision: str = "16-true") -> None:
        _check(precision, ("16-true", "bf16-true"), type(self).__name__)
        self.precision = precision


class DoublePrecision(Precision):
    """Parameters in double precision."""

    precision = "64-true"


class FSDPPrecision(Precision):
    """The number format of a model that is sharded.

    Args:
        precision: `"32-true"`, `"16-true"`, `"bf16-true"`, `"16-mixed"` or `"bf16-mixed"`.
        scaler: Taken for Lightning's sake; one is made where it is needed.
    """

    def __init__(self, precision: str, scaler: Any = None) -> None:
        _check(precision, ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"), type(self).__name__)
        self.precision = precision


class DeepSpeedPrecision(FSDPPrecision):
    """The number format of a model that DeepSpeed trains.

    Args:
        precision: As for a model that is sharded.
    """

    def __init__(self, precision: str) -> None:
        super().__init__(precision)


class TorchSyncBatchNorm:
    """Batch statistics over all processes; the same as `Trainer(sync_batchnorm=True)`."""


SPELLINGS = {
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "bf16-true": "bf16-true",
    "fp16-true": "16-true",
}
"""The names of drivetrain's number formats, and Lightning's."""


def plugin_of(precision: str, device: str, scaler: Any) -> Precision:
    """The number format of a run.

    Args:
        precision: Its name, as Lightning spells it.
        device: The kind of device that the run is on.
        scaler: What scales its losses, if anything does.
    """
    if precision.endswith("-mixed"):
        return MixedPrecision(precision, device, scaler)
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)
    plugin = Precision()
    plugin.precision = precision
    return plugin


def under_old_name(name: str, kind: type[Precision], *dropped: str) -> type[Precision]:
    """A number format under the name that it had in Lightning 1.x, which warns when it is made.

    Args:
        name: The name.
        kind: The number format.
        *dropped: Arguments that it had then, which are taken and not used.
    """

    def warn_and_make(self: Precision, *args: Any, **kwargs: Any) -> None:
        rank_zero_deprecation(f"The `{name}` is deprecated. Use `lightning.pytorch.plugins.{kind.__name__}` instead.")
        kind.__init__(self, *args, **{each: value for each, value in kwargs.items() if each not in dropped})

    return type(name, (kind,), {"__init__": warn_and_make, "__doc__": kind.__doc__})


def _check(precision: str, allowed: tuple[str, ...], name: str) -> None:
    if precision not in allowed:
        raise ConfigurationError(
            f"{name}({precision=}) is not supported. `precision` must be one of {', '.join(map(repr, allowed))}."
        )


def _converted(data: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data)
