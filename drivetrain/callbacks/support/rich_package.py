"""The package rich, which is installed on wish."""

from __future__ import annotations

from importlib.util import find_spec

from drivetrain.runtime.errors import ConfigurationError


def require_rich(owner: str) -> None:
    """Raise where rich is not installed.

    Args:
        owner: What needs it.

    Raises:
        ConfigurationError: It is missing; the message has the command that installs it.
    """
    if find_spec("rich") is None:
        raise ConfigurationError(f'{owner} needs rich, which is not installed: pip install "drivetrain[rich]".')
