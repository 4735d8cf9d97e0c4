"""Kinds of warnings, and warnings of drivetrain as Python's, which scripts filter."""

from __future__ import annotations

import logging
import warnings


class PossibleUserWarning(UserWarning):
    """Something that may be a mistake."""


class AsWarnings(logging.Handler):
    """Gives what is logged at level WARNING to `warnings`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Warn.

        Args:
            record: What was logged.
        """
        if record.levelno == logging.WARNING:
            warnings.warn(record.getMessage(), PossibleUserWarning, stacklevel=8)


def warn_by_warnings() -> None:
    """Let drivetrain's warnings come by Python's `warnings`, as Lightning's do, so that a script's filters hold."""
    logger = logging.getLogger("drivetrain")
    if not any(isinstance(handler, AsWarnings) for handler in logger.handlers):
        logger.addHandler(AsWarnings(logging.WARNING))
