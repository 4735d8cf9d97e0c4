"""What installed packages offer by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def made_by_entry_points(group: str) -> list[Any]:
    """What the functions that installed packages have registered return, one after the other."""
    made = [point.load()() for point in entry_points(group=group)]
    return [one for each in made for one in (each if isinstance(each, list | tuple) else [each])]
