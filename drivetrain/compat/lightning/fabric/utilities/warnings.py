"""Warning categories, and drivetrain's log warnings as Python warnings, which scripts can filter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class PossibleUserWarning(UserWarning):
    """Warning about a possible user mistake."""


class AsWarnings(logging.Handler):
    """Logging handler that turns records of level WARNING into Python warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Issue the record's message as a Python warning."""
        if record.levelno == logging.WARNING:
            warnings.warn(record.getMessage(), PossibleUserWarning, stacklevel=8)


@contextmanager
def warn_by_warnings() -> Iterator[None]:
    """Issue drivetrain's warnings as Python warnings in the `with` body, so that scripts can filter them."""
    logger = logging.getLogger("drivetrain")
    handler = AsWarnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
