"""Objects that installed packages provide through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def made_by_entry_points(group: str) -> list[Any]:
    """Call the functions registered under an entry-point group. Return what they create, as a flat list."""
    made = [point.load()() for point in entry_points(group=group)]
    return [one for each in made for one in (each if isinstance(each, list | tuple) else [each])]
