"""The package rich, which is installed on wish."""

from __future__ import annotations

import random
from importlib import import_module
from importlib.util import find_spec

from drivetrain.runtime.errors import ConfigurationError


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
