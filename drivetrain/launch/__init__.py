"""Launchers: start several processes from the command line, from a script or from a notebook.

Public names are imported on first use, since every rank imports this package before its script runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

# public name -> the module that defines it
_EXPORTS = {
    "LaunchOptions": "drivetrain.launch.options",
    "launch_script": "drivetrain.launch.launcher",
    "already_launched": "drivetrain.launch.relaunch",
    "relaunch_script": "drivetrain.launch.relaunch",
    "notebook_launcher": "drivetrain.launch.notebook",
}

__all__ = [*sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.launch.launcher import launch_script as launch_script
    from drivetrain.launch.notebook import notebook_launcher as notebook_launcher
    from drivetrain.launch.options import LaunchOptions as LaunchOptions
    from drivetrain.launch.relaunch import already_launched as already_launched
    from drivetrain.launch.relaunch import relaunch_script as relaunch_script
