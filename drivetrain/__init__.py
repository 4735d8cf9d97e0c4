"""drivetrain: one task class, one `fit`, any hardware.

Names are resolved on first use, so importing the package costs next to nothing and the command
line needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that defines it
_EXPORTS: dict[str, str] = {
    "PartialState": "drivetrain.runtime.state",
    "DistributedType": "drivetrain.runtime.state",
    "ProcessEnvironment": "drivetrain.runtime.environment",
    "DeviceKind": "drivetrain.runtime.devices",
    "register_device": "drivetrain.runtime.devices",
    "DrivetrainError": "drivetrain.runtime.errors",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


if TYPE_CHECKING:
    from drivetrain.runtime.devices import DeviceKind as DeviceKind
    from drivetrain.runtime.devices import register_device as register_device
    from drivetrain.runtime.environment import ProcessEnvironment as ProcessEnvironment
    from drivetrain.runtime.errors import DrivetrainError as DrivetrainError
    from drivetrain.runtime.state import DistributedType as DistributedType
    from drivetrain.runtime.state import PartialState as PartialState
