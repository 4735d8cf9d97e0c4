"""What launchers write to the terminal, whichever starts the ranks."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.launch.agent import LOST_AFTER
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.report import RankFailure, describe
from drivetrain.runtime.environment import COMMAND_VARIABLE, LAUNCHED_VARIABLE
from drivetrain.runtime.errors import FULL_VARIABLE
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from drivetrain.runtime.terminal import flush_output, print_text


def write(text: str) -> None:
    """Write to stderr, after what has been written to stdout."""
    flush_output()
    print_text(text, file=sys.stderr)


def announce(text: str) -> None:
    """Write a line in drivetrain's name."""
    write(text if text.startswith("drivetrain: ") else f"drivetrain: {text}")


def resumable(what: str = "the run was preempted and has saved its state") -> int:
    """Explain that the run can be resumed; the exit code that means so."""
    announce(f"{what}: start it again to resume (exit code {RESUME_EXIT_CODE}).")
    return RESUME_EXIT_CODE


def announce_restart(failure: RankFailure | None, world_size: int, number: int, most: int) -> None:
    """Write why all processes start again, in one line, and the traceback where there is one.

    Args:
        failure: The first failure of the attempt that has ended; None where a machine is gone.
        world_size: Processes of the run.
        number: Which restart this is; 0 for one that does not count.
        most: How many there may be.
    """
    count = f" (restart {number} of {most})" if number else ""
    then = f"Starting all processes again{count}."
    if failure is None:
        announce(f"a machine gave no sign of life for {LOST_AFTER:g} s. {then}")
    elif failure.exit_code == RESUME_EXIT_CODE:
        announce(f"the run was preempted and has saved its state. {then}")
    else:
        write(describe(failure, world_size, then=then, advise=False))


def exit_code_after(
    received: signal.Signals,
    *,
    overdue: Sequence[int],
    grace_period: float,
    preempted: bool,
    succeeded: bool,
    described: str,
) -> int:
    """Explain how a run ended after a signal was passed on to its ranks; the exit code for it.

    Args:
        received: The signal.
        overdue: Ranks that had to be killed.
        grace_period: Seconds that they had.
        preempted: Whether they have saved, so that the run can be resumed.
        succeeded: Whether all were through before they had to stop.
        described: The failure to show; empty where there is none.
    """
    if overdue:
        ranks = ", ".join(str(rank) for rank in overdue)
        announce(
            f"{grace_period:g} s after {received.name}, rank {ranks} had not ended and was killed. Give more time with "
            "--preemption_grace_period."
        )
    if preempted:
        return resumable()
    if received == signal.SIGUSR1 and succeeded:
        return 0
    if described:
        write(described)
    return 128 + received


# What every launcher gives its ranks, on whatever machine they are. Imports no torch


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
