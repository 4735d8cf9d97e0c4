"""The package jsonargparse, which is installed on wish."""

from __future__ import annotations

from importlib.util import find_spec

from drivetrain.runtime.errors import ConfigurationError

IS_INSTALLED = find_spec("jsonargparse") is not None and find_spec("docstring_parser") is not None
"""Whether jsonargparse is there, with what it needs to read signatures."""


def require_jsonargparse(owner: str) -> None:
    """Raise where jsonargparse is not installed.

    Args:
        owner: What needs it.

    Raises:
        ConfigurationError: It is missing; the message has the command that installs it.
    """
    if not IS_INSTALLED:
        raise ConfigurationError(
            f'{owner} needs jsonargparse[signatures], which is not installed: pip install "drivetrain[cli]".',
            code="DT-013",
        )


def is_of_jsonargparse(error: BaseException) -> bool:
    """Whether jsonargparse itself raised an error, rather than something that it called.

    Args:
        error: The error.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("jsonargparse")
