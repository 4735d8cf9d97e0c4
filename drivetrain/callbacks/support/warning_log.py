"""The warnings of a run, in order."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

_MOST = 200
_LONGEST = 2000


class WarningLog(logging.Handler):
    """Records what Python's `warnings` and drivetrain's loggers warn of; both are shown as they were without it.

    Args:
        step: Returns the optimizer step that a warning belongs to.
        clean: Returns a text without secrets.

    Attributes:
        found: Time, step and text of each warning, and how often it came.
    """

    def __init__(self, step: Callable[[], int], clean: Callable[[str], str]) -> None:
        super().__init__(logging.WARNING)
        self._step, self._clean = step, clean
        self._logger = logging.getLogger("drivetrain")
        self._before: Callable[..., Any] | None = None
        self.found: list[list[Any]] = []
        self._known: dict[str, list[Any]] = {}

    def open(self) -> None:
        """Record from now on."""
        self._logger.addHandler(self)
        self._before, warnings.showwarning = warnings.showwarning, self._show

    def close(self) -> None:
        """Record no longer."""
        self._logger.removeHandler(self)
        if self._before is not None and warnings.showwarning == self._show:
            warnings.showwarning = self._before
        self._before = None
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Record a line of a logger."""
        self._add(record.getMessage())
        # Python prints warnings for which no handler is there; this one shows nothing.
        if not self._has_other_handlers(record) and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def _has_other_handlers(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False

    def _show(self, message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        self._add(f"{category.__name__}: {message}")
        if self._before is not None:
            self._before(message, category, *rest, **options)

    def _add(self, text: str) -> None:
        known = self._known.get(text)
        if known is not None:
            known[3] += 1
        elif len(self.found) < _MOST:
            shown = self._clean(text[:_LONGEST])
            self._known[text] = entry = [time.time(), self._step(), shown, 1]
            self.found.append(entry)
