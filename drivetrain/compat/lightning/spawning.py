"""Processes that a strategy such as `"ddp_spawn"` starts, with the packages that drivetrain stands for in this one."""

from __future__ import annotations

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
    """Call a function in each process that a strategy starts. Returns what it returned in the first."""
    from drivetrain.launch.notebook import call_in_processes  # here: few scripts start processes
    from drivetrain.launch.options import LaunchOptions

    options = LaunchOptions(num_processes=spawning.num_processes, cpu=spawning.kind == "cpu")
    prepare = installed_packages()
    return call_in_processes(function, args, options, spawning.start_method, prepare=prepare, takes_over=True)
