"""Settings as a table for people: what is in force, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.settings.sources import Given
from drivetrain.launch.settings.table import GROUPS, SETTINGS


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
    return table(("setting", "value", "from"), lines)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Lines with aligned columns.

    Args:
        heads: What the columns hold.
        rows: The cells of each line.
    """
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )
