"""Processes that a strategy such as `"ddp_spawn"` starts for one function, and that end with it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drivetrain.compat.aliases import PACKAGES, install
from drivetrain.launch import already_launched, notebook_launcher
from drivetrain.launch.forking import cloudpickle_dumps
from drivetrain.runtime.devices import detect_device_kind, get_device_kind
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

_METHODS = ("ddp_spawn", "ddp_fork", "ddp_notebook")


class SpawnedProcesses:
    """How many processes are started for a function, and the strategy within them.

    Args:
        strategy: The strategy within them.
        num_processes: How many.
    """

    def __init__(self, strategy: str, num_processes: int) -> None:
        self.strategy, self.num_processes = strategy, num_processes

    @classmethod
    def asked_for(cls, strategy: Any, devices: Any, accelerator: Any) -> Self | None:
        """The processes that Lightning's name of a strategy asks for; None for any other strategy.

        Args:
            strategy: The argument of a Trainer or a Fabric.
            devices: The same.
            accelerator: The same.
        """
        method = next((each for each in _METHODS if isinstance(strategy, str) and strategy.startswith(each)), None)
        if method is None:
            return None
        inner = "ddp" + strategy.removeprefix(method)
        return cls(inner, 1 if already_launched() else _number(devices, accelerator))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in each process. Returns what it returned in the first.

        Args:
            function: A function of a module.
            *args: Its arguments, which are pickled.
        """
        names = [name for name in PACKAGES if name in sys.modules]
        dumps = cloudpickle_dumps() or pickle.dumps
        given = (names, dumps((function, args)))
        return notebook_launcher(_call, given, num_processes=self.num_processes, start_method="spawn")


def _call(names: list[str], pickled: bytes) -> Any:
    """What each process does, once the packages are there that drivetrain stands for."""
    for name in names:
        install(name)
    function, args = pickle.loads(pickled)
    return function(*args)


def _number(devices: Any, accelerator: Any) -> int:
    """How many processes an argument of a Trainer asks for."""
    kind = detect_device_kind() if accelerator == "auto" else get_device_kind(accelerator)
    if isinstance(devices, list | tuple):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        return int(kind.default_processes())
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigurationError(
            f"devices={devices!r}: give a number, the numbers of devices, or 'auto'.", code="DT-003"
        )
    return int(devices)
