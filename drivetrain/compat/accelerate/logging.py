"""Loggers of distributed runs under Accelerate's names."""

from __future__ import annotations

from typing import Any

from drivetrain.runtime import logging as runtime
from drivetrain.runtime.logging import RankLogger

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(RankLogger):
    """`drivetrain.runtime.logging.RankLogger` that counts `stacklevel` as Accelerate does: 2 is the caller's line."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the main process or, with `main_process_only=False`, on all processes."""
        super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning once. Later calls with equal message and arguments are ignored."""
        super().warning_once(msg, *args, **{"stacklevel": 3, **kwargs})

    def info_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log an info message once. Later calls with equal message and arguments are ignored."""
        super().info_once(msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for distributed runs, which by default logs on the main process only.

    Args:
        name: Name of the logger, usually `__name__`.
        log_level: Name or number of a level.
    """
    return MultiProcessAdapter(runtime.get_logger(name, log_level).logger, {})
