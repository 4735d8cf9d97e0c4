"""Spawn processes for strategies such as `"ddp_spawn"`, with the same package aliases installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from drivetrain.compat.aliases import PACKAGES, install
from drivetrain.strategies.base import StartsProcesses


def installed_packages() -> tuple[Callable[..., Any], tuple[str, ...]] | None:
    """Return a function and its arguments that install this process's aliases in another process, or None."""
    names = [name for name, target in PACKAGES.items() if getattr(sys.modules.get(name), "__name__", "") == target]
    return (install, tuple(names)) if names else None


def call_spawned(spawning: StartsProcesses, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in each process that the strategy starts. Return rank 0's result."""
    from drivetrain.launch.notebook import call_in_processes  # imported here, because few scripts start processes
    from drivetrain.launch.options import LaunchOptions

    options = LaunchOptions(num_processes=spawning.num_processes, cpu=spawning.kind == "cpu")
    prepare = installed_packages()
    return call_in_processes(function, args, options, spawning.start_method, prepare=prepare, takes_over=True)
