"""A logger for runs of several processes, so that a line is printed once and not once per process."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.process_group import barrier
from drivetrain.runtime.state import PartialState
from drivetrain.runtime.terminal import print_text, shown

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

LOG_LEVEL_VARIABLE = "DRIVETRAIN_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """A logger for the module `name` that prints on the main process unless asked otherwise.

    Every logging method takes two more keyword arguments: `main_process_only` (default True), and
    `in_order` (default False), which logs on all processes, one after the other. Making or using the logger
    never starts a process group.

    Args:
        name: The logger's name, usually `__name__`.
        log_level: A level name or number. Without it the environment variable `DRIVETRAIN_LOG_LEVEL`
            decides, and without that the configuration of Python's logging.

    Raises:
        ConfigurationError: If the level has an unknown name.

    Example:
        ```python
        logger = get_logger(__name__, log_level="INFO")
        logger.info("printed once")
        logger.info("printed by every process", main_process_only=False)
        ```
    """
    logger = logging.getLogger(name)
    source = "log_level"
    if log_level is None:
        log_level = os.environ.get(LOG_LEVEL_VARIABLE) or None
        source = LOG_LEVEL_VARIABLE
    if log_level is not None:
        logger.setLevel(_parse_level(log_level, source))
        if not any(isinstance(handler, _FallbackHandler) for handler in logger.handlers):
            logger.addHandler(_FallbackHandler(name))
    return RankLogger(logger, {})


class RankLogger(_Adapter):
    """Python's logger with `main_process_only` and `in_order` on every method; made by `get_logger`."""

    def __init__(self, logger: logging.Logger, extra: dict[str, object]) -> None:
        super().__init__(logger, extra)
        self._seen: set[tuple[int, str, str]] = set()

    def log(  # type: ignore[override]
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log a message on the main process, or on all of them."""
        if not in_order and not self.isEnabledFor(level):
            return
        rank, world_size = rank_and_world_size()
        if world_size > 1 and (in_order or not main_process_only):
            msg = f"[rank {rank}] {msg}"
        elif rank != 0:
            return
        if isinstance(msg, str):
            msg = shown(msg)
        args = tuple(shown(each) if isinstance(each, str) else each for each in args)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        # In order, a level that differs between ranks must leave no rank waiting: all of them take every turn.
        for turn in range(world_size) if in_order else (rank,):
            if turn == rank:
                self.logger.log(level, msg, *args, **kwargs)
            if in_order:
                _wait_for_others()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning the first time that this logger is given this message with these arguments."""
        if self._is_new(logging.WARNING, msg, args):
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def info_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log at level INFO the first time that this logger is given this message with these arguments."""
        if self._is_new(logging.INFO, msg, args):
            self.log(logging.INFO, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def _is_new(self, level: int, msg: object, args: tuple[object, ...]) -> bool:
        """Whether this message was not given before; remembers it."""
        key = (level, str(msg), repr(args) if args else "")
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


class _FallbackHandler(logging.Handler):
    """Prints to standard error while no handler is configured for Python's logging.

    Without it Python prints nothing below WARNING, whatever the logger's level. It keeps still once the root
    logger has a handler, and belongs to one logger, so that no line is printed twice.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == self._name and not logging.getLogger().handlers:
            print_text(self.format(record), file=sys.stderr)


def _parse_level(level: str | int, source: str) -> int:
    """The number of a level; `source` names in the error message where it was set."""
    if isinstance(level, int):
        return level
    name = level.upper()
    if name not in _LEVELS:
        raise ConfigurationError(
            f"{source}={level!r} is not a log level. Allowed: {', '.join(_LEVELS)}.{nearest(name, _LEVELS)}",
        )
    return int(getattr(logging, name))


def _wait_for_others() -> None:
    """Wait for all processes; also without a `PartialState`, where the script made the process group."""
    state = PartialState.existing()
    if state is not None:
        state.wait_for_everyone()
    else:
        barrier()


def rank_and_world_size() -> tuple[int, int]:
    """This process among its peers; starts nothing, and lets no broken environment break a log line."""
    state = PartialState.existing()
    try:
        environment = state.environment if state is not None else ProcessEnvironment.detect()
    except DrivetrainError:
        return 0, 1
    return environment.rank, environment.world_size
