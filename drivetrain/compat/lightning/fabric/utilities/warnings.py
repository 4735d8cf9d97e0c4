"""Kinds of warnings, and warnings of drivetrain as Python's, which scripts filter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class PossibleUserWarning(UserWarning):
    """Something that may be a mistake."""


class AsWarnings(logging.Handler):
    """Gives what is logged at level WARNING to `warnings`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Warn."""
        if record.levelno == logging.WARNING:
            warnings.warn(record.getMessage(), PossibleUserWarning, stacklevel=8)


@contextmanager
def warn_by_warnings() -> Iterator[None]:
    """Let drivetrain's warnings in the body come by Python's `warnings`, as Lightning's do, which scripts filter."""
    logger = logging.getLogger("drivetrain")
    handler = AsWarnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
