"""Support for loggers that have a logger's methods without its base class."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.trackers import Tracker
from drivetrain.trackers.base import COMPLETED


class DuckLogger(Logger):
    """Adapter from drivetrain's tracker interface to an object with a logger's methods."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    @property
    def name(self) -> str | None:  # type: ignore[override]
        return _text(self.original, "name")

    @property
    def version(self) -> str | None:
        return _text(self.original, "version")

    @property
    def save_dir(self) -> str | None:
        return _text(self.original, "save_dir")

    def log_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None:
        self.original.log_metrics(metrics=metrics, step=step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(self.original, "log_hyperparams"):
            self.original.log_hyperparams(params, *args, **kwargs)

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        if hasattr(self.original, "finalize"):
            self.original.finalize("success" if status == COMPLETED else status)


def _text(original: Any, name: str) -> str | None:
    found = getattr(original, name, None)
    return str(found) if isinstance(found, str | int | os.PathLike) else None


def as_loggers(given: Any) -> Any:
    """Wrap objects that only have a logger's methods in a `DuckLogger`. Other values are returned unchanged.

    Args:
        given: The value of `Trainer(logger=...)`.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [as_loggers(each) for each in given]
    has_its_methods = callable(getattr(given, "log_metrics", None)) and not isinstance(given, Tracker)
    return DuckLogger(given) if has_its_methods else given


def given_as(logger: Any) -> Any:
    """Return the user's object behind a `DuckLogger`. Other loggers are returned unchanged."""
    return logger.original if isinstance(logger, DuckLogger) else logger
