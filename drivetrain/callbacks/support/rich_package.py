"""The package rich, which is installed on wish."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import Lenient

if TYPE_CHECKING:
    from rich.console import Console


def require_rich(owner: str) -> None:
    """Import rich, which draws a random number as it is imported: Python's generator is put back to where it was.

    Args:
        owner: What needs it.

    Raises:
        ConfigurationError: It is missing; the message has the command that installs it.
    """
    if find_spec("rich") is None:
        raise ConfigurationError(
            f'{owner} needs rich, which is not installed: pip install "drivetrain[rich]".', code="DT-013"
        )
    state = random.getstate()
    import_module("rich.style")
    random.setstate(state)


def make_console(**options: Any) -> Console:
    """Return rich's console for the standard output or error, which loses what cannot be written instead of raising.

    Args:
        **options: For `rich.console.Console`.
    """
    from rich.console import Console

    return Console(**{"file": Lenient(sys.stderr if options.get("stderr") else sys.stdout), **options})
