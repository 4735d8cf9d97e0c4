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
    "gather": "drivetrain.runtime.collectives",
    "gather_object": "drivetrain.runtime.collectives",
    "reduce": "drivetrain.runtime.collectives",
    "broadcast": "drivetrain.runtime.collectives",
    "broadcast_object_list": "drivetrain.runtime.collectives",
    "pad_across_processes": "drivetrain.runtime.collectives",
    "concatenate": "drivetrain.runtime.nested",
    "find_batch_size": "drivetrain.runtime.nested",
    "recursively_apply": "drivetrain.runtime.nested",
    "send_to_device": "drivetrain.runtime.nested",
    "set_seed": "drivetrain.runtime.seeds",
    "get_logger": "drivetrain.runtime.logging",
    "ConfigurationError": "drivetrain.runtime.errors",
    "DeviceNotAvailableError": "drivetrain.runtime.errors",
    "CollectiveError": "drivetrain.runtime.errors",
    "CheckpointError": "drivetrain.runtime.errors",
    "DataError": "drivetrain.runtime.errors",
    "LaunchError": "drivetrain.runtime.errors",
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
    from drivetrain.runtime.collectives import broadcast as broadcast
    from drivetrain.runtime.collectives import broadcast_object_list as broadcast_object_list
    from drivetrain.runtime.collectives import gather as gather
    from drivetrain.runtime.collectives import gather_object as gather_object
    from drivetrain.runtime.collectives import pad_across_processes as pad_across_processes
    from drivetrain.runtime.collectives import reduce as reduce
    from drivetrain.runtime.devices import DeviceKind as DeviceKind
    from drivetrain.runtime.devices import register_device as register_device
    from drivetrain.runtime.environment import ProcessEnvironment as ProcessEnvironment
    from drivetrain.runtime.errors import CheckpointError as CheckpointError
    from drivetrain.runtime.errors import CollectiveError as CollectiveError
    from drivetrain.runtime.errors import ConfigurationError as ConfigurationError
    from drivetrain.runtime.errors import DataError as DataError
    from drivetrain.runtime.errors import DeviceNotAvailableError as DeviceNotAvailableError
    from drivetrain.runtime.errors import DrivetrainError as DrivetrainError
    from drivetrain.runtime.errors import LaunchError as LaunchError
    from drivetrain.runtime.logging import get_logger as get_logger
    from drivetrain.runtime.nested import concatenate as concatenate
    from drivetrain.runtime.nested import find_batch_size as find_batch_size
    from drivetrain.runtime.nested import recursively_apply as recursively_apply
    from drivetrain.runtime.nested import send_to_device as send_to_device
    from drivetrain.runtime.seeds import set_seed as set_seed
    from drivetrain.runtime.state import DistributedType as DistributedType
    from drivetrain.runtime.state import PartialState as PartialState
