"""What a Trainer is asked to run on, checked in Lightning's words."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
)
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError
from drivetrain.strategies.precision import resolve_precision

_CLASSES = {kind.kind: kind.__name__ for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator)}


class AcceleratorNotAvailableError(ConfigurationError, DeviceNotAvailableError):
    """This machine has no device of the kind that was asked for."""

    code = "DT-020"


def kind_of(accelerator: Any) -> Any:
    """The name of a kind of device that one of Lightning's objects stands for; anything else as it is.

    Args:
        accelerator: What was given. `"gpu"` is Apple's where there is no other.
    """
    if issubclass(type(accelerator), Accelerator):  # not isinstance: an engine is one of the kind that it runs on
        return accelerator.kind
    if accelerator == "gpu" and MPSAccelerator.is_available() and not CUDAAccelerator.is_available():
        return MPSAccelerator.kind
    return accelerator


def check_hardware(accelerator: Any, devices: Any) -> None:
    """Refuse a kind of device that is not here, and a run on no device.

    Args:
        accelerator: The name of a kind of device; anything else is taken.
        devices: Which of them, or how many.

    Raises:
        ConfigurationError: No kind has this name, or no device was asked for.
        AcceleratorNotAvailableError: This machine has none of that kind.
    """
    if not isinstance(accelerator, str):
        return
    if devices in (0, "0") or (isinstance(devices, list | tuple) and not devices):
        raise ConfigurationError(
            f"`Trainer(devices={devices!r})` value is not a valid input using the accelerator {accelerator!r}: a run "
            "needs one device at least. Give a number from 1 on, the numbers of devices such as [0], or 'auto'.",
            code="DT-002",
        )
    if accelerator == "auto":
        return
    try:
        get_device_kind(accelerator)
    except DeviceNotAvailableError as error:
        missing = (
            "No supported gpu backend found!"
            if accelerator == "gpu"
            else f"`{_CLASSES.get(accelerator, accelerator)}` can not run on your system since the accelerator is not "
            "available."
        )
        raise AcceleratorNotAvailableError(f"{missing} {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(
            f"You selected an invalid accelerator name: `accelerator={accelerator!r}`. {error.message}", code="DT-001"
        ) from None


def check_precision(precision: Any) -> None:
    """Refuse a number format that there is not.

    Args:
        precision: Its name, or the format itself.

    Raises:
        ConfigurationError: No number format has this name.
    """
    try:
        resolve_precision(precision)
    except ConfigurationError as error:
        raise ConfigurationError(f"Precision {precision!r} is invalid. {error.message}", code="DT-001") from None
