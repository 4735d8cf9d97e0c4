"""What every launcher gives its ranks, on whatever machine they are. Imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from drivetrain.launch.options import LaunchOptions
from drivetrain.runtime.environment import COMMAND_VARIABLE, LAUNCHED_VARIABLE
from drivetrain.runtime.tracebacks import FULL_VARIABLE

_STAND_INS = Path(__file__).parents[1] / "compat" / "stand_ins"


def variables_of_run(options: LaunchOptions) -> dict[str, str]:
    """The environment variables of a run that depend on no machine: settings, and what the script imports.

    Args:
        options: What was asked for.
    """
    variables = {LAUNCHED_VARIABLE: "1", COMMAND_VARIABLE: shlex.join(sys.orig_argv)}
    variables |= options.variables
    if options.debug:
        variables["DRIVETRAIN_DEBUG"] = "1"
    if options.full_traceback:
        variables[FULL_VARIABLE] = "1"
    if options.stand_in is not None:
        # Found before the original by every Python that a rank is or starts, also by one that is not ours.
        paths = [str(_STAND_INS / options.stand_in), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables
