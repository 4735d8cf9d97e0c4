"""Names of another framework that scripts import and that drivetrain does not have: they raise when they are called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from drivetrain.runtime.errors import DrivetrainError


class AbsentNameError(DrivetrainError, NotImplementedError):
    """Something of another framework was called that drivetrain does not have."""


def absent(name: str, reason: str, package: str = "accelerate") -> type:
    """A class to import, to inherit from and to check instances against, that raises when it is called.

    Args:
        name: Its name there.
        reason: Why it is not here, and what to do.
        package: The framework.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise AbsentNameError(f"{package}'s {name} was called. {reason}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in drivetrain. {reason}"})


def absent_names(module: str, *groups: tuple[str, Iterable[str]], room: str | None = None) -> Callable[[str], Any]:
    """A module's `__getattr__` for the names that it does not have.

    Args:
        module: The module's name.
        groups: Reasons, each with the names that it holds for.
        room: A package of drivetrain; a name that it has is taken from there.
    """
    package = module.removeprefix("drivetrain.compat.").partition(".")[0]
    reasons = {name: reason for reason, names in groups for name in names}
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in reasons:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in made:
            found = None if room is None else getattr(importlib.import_module(room), name, None)
            made[name] = absent(name, reasons[name], package) if found is None else found
        return made[name]

    return get
