"""Processes that a strategy such as `"ddp_spawn"` starts, with the packages that drivetrain stands for in this one."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from drivetrain.compat.aliases import PACKAGES, install
from drivetrain.strategies.base import StartsProcesses


def installed_packages() -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """What installs, in another process, the packages that are installed here; and its arguments."""
    names = [name for name, target in PACKAGES.items() if getattr(sys.modules.get(name), "__name__", "") == target]
    return (install, tuple(names)) if names else None


def call_spawned(spawning: StartsProcesses, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in each process that a strategy starts. Returns what it returned in the first.

    Args:
        spawning: What starts them.
        function: A function of a module.
        *args: Its arguments, which are pickled for new interpreters.
    """
    from drivetrain.launch.notebook import call_in_processes, sent
    from drivetrain.launch.script_main import ScriptMain  # here: few scripts start processes

    given: Any = function, args
    if spawning.start_method != "fork":
        given = sent(given, ScriptMain.here() is not None)
    arguments = installed_packages(), given
    return call_in_processes(
        _call, arguments, spawning.num_processes, spawning.start_method, cpu=spawning.kind == "cpu"
    )


def _call(prepare: tuple[Callable[..., Any], tuple[str, ...]] | None, given: Any) -> Any:
    """What each process does, once the packages are there."""
    if prepare is not None:
        install, names = prepare
        install(*names)
    function, args = pickle.loads(given) if isinstance(given, bytes) else given
    return function(*args)
