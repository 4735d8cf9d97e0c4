"""What Accelerate has in `accelerate.utils`, so that a script changes the package's name in that import too."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.accelerate import utils as _there


def __getattr__(name: str) -> Any:
    try:
        return getattr(_there, name)
    except AttributeError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error


def __dir__() -> list[str]:
    return dir(_there)
