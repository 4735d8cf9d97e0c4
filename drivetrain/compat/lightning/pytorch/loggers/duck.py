"""Loggers that are of no base class, but have the methods of one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.trackers import Tracker
from drivetrain.trackers.base import COMPLETED


class DuckLogger(Logger):
    """Gives what a run logs to an object that has a logger's methods."""

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
    """What `Trainer(logger=)` was given, with a `DuckLogger` around each object that has but the methods of a logger.

    Args:
        given: A logger, several, or one of the other values that are taken.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [as_loggers(each) for each in given]
    has_its_methods = callable(getattr(given, "log_metrics", None)) and not isinstance(given, Tracker)
    return DuckLogger(given) if has_its_methods else given


def given_as(logger: Any) -> Any:
    """A logger as the script gave it."""
    return logger.original if isinstance(logger, DuckLogger) else logger
