"""Processes for one function, from a script that stays one process: they end with it, and its value comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.launch.forking import free_port, refuse_what_a_fork_would_break
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.processes import Call, PickledCall, Processes, variables_of_processes
from drivetrain.launch.script_main import stop_at_start_of_processes


def call_in_processes(
    function: Callable[..., Any], args: Sequence[Any], num_processes: int, start_method: str, cpu: bool
) -> Any:
    """Run a function of a module in several processes of this machine.

    Ctrl-C, SIGTERM and SIGUSR1 reach each of them once. They end with this process, however it ends.

    Args:
        function: What each runs.
        args: Its arguments; pickled for new interpreters.
        num_processes: How many.
        start_method: `"spawn"` for new interpreters, or `"fork"`.
        cpu: Run them on the CPU, also where there are accelerators.

    Returns:
        What it returned in the first process.

    Raises:
        InterruptedProcessesError: Ctrl-C, after which the first process has returned a value.
        LaunchError: A process failed, or cannot be started; the message holds the first one's traceback.
        ConfigurationError: There are fewer devices than processes.
    """
    stop_at_start_of_processes()
    plan = LaunchPlan.make(LaunchOptions(num_processes=num_processes, cpu=cpu))
    if start_method == "fork":
        refuse_what_a_fork_would_break(plan.kind)
    call = Call(function, args) if start_method == "fork" else PickledCall(function, args)
    variables = {**variables_of_processes(plan, num_processes), "MASTER_PORT": str(free_port())}
    return Processes(start_method, call, variables, forwards_signals=True).run()
