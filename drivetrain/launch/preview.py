"""What a launch would do: a table of processes, devices, environment, and where each value comes from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.settings.environment import variables_of
from drivetrain.launch.settings.sources import Given
from drivetrain.launch.settings.table import GROUPS, SETTINGS
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
    plan = LaunchPlan.make(options)
    kind = "module" if options.module else "program" if options.no_python else "script"
    processes = plan.local_processes * options.max_machines
    on_machines = f" on {options.num_machines} machines" if options.max_machines > 1 else ""
    parts = [
        f"{processes} process(es){on_machines} would run the {kind} {' '.join((script, *args))}",
        "",
        _table(("rank", "local rank", "device"), _processes(options, plan)),
        "",
        _table(("setting", "value", "from"), settings_rows(given)),
        "",
        _table(("variable", "value", "from"), _variables(options, plan, given)),
    ]
    return "\n".join(parts)


def settings_rows(given: Mapping[str, Given]) -> list[tuple[str, str, str]]:
    """Each setting that is given, its value, and where that comes from; with the reason where it changes nothing.

    Args:
        given: By name of setting.
    """
    rows = []
    for name, setting in SETTINGS.items():
        if name not in given or (setting.refused and not given[name].value):
            continue
        group = GROUPS.get(setting.group)
        idle = setting.inert
        if not idle and group is not None and group.switch and group.switch not in given:
            idle = f"{group.switch} is not set"
        reason = f"; changes nothing: {idle}" if idle else ""
        rows.append((name, setting.text(given[name].value), f"{given[name].source}{reason}"))
    return rows or [("(none)", "", "every setting has its default")]


def settings_table(options: LaunchOptions, given: Mapping[str, Given]) -> str:
    """Every setting of the top, and those of groups that are given, with their values and where these come from.

    Args:
        options: What is in force.
        given: Where the values come from, by name of setting.
    """
    rows = {name: (name, value, source) for name, value, source in settings_rows(given)}
    lines = []
    for name, setting in SETTINGS.items():
        if name in rows:
            lines.append(rows[name])
        elif hasattr(options, name) and not setting.inert:
            value = getattr(options, name)
            lines.append((name, "-" if value in (None, "") else setting.text(value), "default"))
    return _table(("setting", "value", "from"), lines)


def _processes(options: LaunchOptions, plan: LaunchPlan) -> list[tuple[str, str, str]]:
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


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )
