"""What a launch would do: a table of processes, devices, environment, and where each value comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from drivetrain.launch.cores import THREADS_VARIABLE
from drivetrain.launch.listing import settings_rows, table
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.settings.environment import variables_of
from drivetrain.launch.settings.sources import Given
from drivetrain.launch.settings.table import SETTINGS
from drivetrain.launch.variables import variables_of_run
from drivetrain.runtime.devices import get_device_kind

_MOST_PROCESSES = 16  # that are listed one by one


def preview(options: LaunchOptions, given: Mapping[str, Given], script: str, args: Sequence[str] = ()) -> str:
    """Describe a launch without starting it.

    Args:
        options: What it is asked to do.
        given: Where the values come from, by name of setting.
        script: What it runs.
        args: The script's arguments.

    Returns:
        Several lines.

    Raises:
        ConfigurationError: The options do not fit this machine.
        DeviceNotAvailableError: Accelerators were asked for where there are none.
    """
    plan = _on_ray(options) if options.launcher == "ray" else LaunchPlan.make(options)
    kind = "module" if options.module else "program" if options.no_python else "script"
    processes = plan.local_processes * options.max_machines
    on_machines = f" on {options.num_machines} machines" if options.max_machines > 1 else ""
    parts = [
        f"{processes} process(es){on_machines} would run the {kind} {' '.join((script, *args))}",
        "",
        table(("rank", "local rank", "device"), _processes(options, plan)),
        "",
        table(("setting", "value", "from"), settings_rows(given)),
        "",
        table(("variable", "value", "from"), _variables(options, plan, given)),
    ]
    return "\n".join(parts)


def _on_ray(options: LaunchOptions) -> LaunchPlan:
    """What is known of a run on Ray before its cluster is asked."""
    variables = variables_of_run(options)
    if options.num_cpu_threads_per_process is not None:
        variables[THREADS_VARIABLE] = str(options.num_cpu_threads_per_process)
    return LaunchPlan(options.num_processes or 1, "cpu", variables)


def _processes(options: LaunchOptions, plan: LaunchPlan) -> list[tuple[str, str, str]]:
    if options.launcher == "ray":
        ranks = f"0 to {plan.local_processes - 1}" if options.num_processes else "one a GPU, or 0"
        return [(ranks, "where Ray places it", "cpu" if options.cpu else "a GPU where the cluster has any")]
    device = get_device_kind(plan.kind)
    # With machines that come and go, ranks are given as they arrive.
    first = plan.local_processes * options.machine_rank if options.min_machines == options.max_machines else 0
    ids = options.device_ids
    rows = []
    for local in range(min(plan.local_processes, _MOST_PROCESSES)):
        at = str(device.device(local))
        named = f" (device {ids[local]} of this machine)" if ids is not None else ""
        rows.append((str(first + local), str(local), at + named))
    left = plan.local_processes - len(rows)
    return [*rows, ("...", "...", f"{left} more")] if left else rows


def _variables(options: LaunchOptions, plan: LaunchPlan, given: Mapping[str, Given]) -> list[tuple[str, str, str]]:
    source = {}
    for name, each in given.items():
        for variable in variables_of({**options.values, name: each.value}):
            if variable == SETTINGS[name].variable:
                source[variable] = each.source
    rows = [(name, value, source.get(name, "the launcher")) for name, value in sorted(plan.variables.items())]
    inherited = [
        (name, os.environ[name], "environment")
        for name in sorted(os.environ)
        if name.startswith(("DRIVETRAIN_", "ACCELERATE_", "OMP_", "CUDA_VISIBLE")) and name not in plan.variables
    ]
    return rows + inherited
