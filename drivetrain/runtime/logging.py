"""Loggers for distributed runs, and the logger `drivetrain`, on which a run reports what it does.

If the program has not configured logging, the lines of a run are printed instead.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.environment import LOG_FORMAT_VARIABLE, LOG_FORMATS, ProcessEnvironment
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
    """Return a logger for distributed runs, which by default logs on the main process only.

    Every logging method takes two more keyword arguments. `main_process_only` is True by default. `in_order` (False by
    default) logs on all processes, one after the other. Creating or using the logger never starts a process group.

    Args:
        name: The logger's name, usually `__name__`.
        log_level: A level's name or number. The default is the environment variable `DRIVETRAIN_LOG_LEVEL`, and without
            it the configuration of Python's `logging`.

    Returns:
        A `RankLogger`.

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


def report(text: str, level: int = logging.INFO, show: Callable[[str], object] = print_text, **fields: object) -> None:
    """Log a line about the run at `level`, or pass the line to `show` if Python's logging has no handler.

    Args:
        text: The line.
        level: Its level.
        show: Prints the line if no handler of Python's `logging` receives it.
        **fields: Facts that the line contains, such as `epoch` and `values`. They become attributes of the record, and
            keys with `--log_format json`.
    """
    if is_configured():
        _RUN.log(level, "%s", text, extra=fields, stacklevel=2)
    else:
        collect(text)
        show(text)


def is_configured() -> bool:
    """Return True if the program has configured logging."""
    return any(not isinstance(handler, Collector) for handler in _RUN.handlers + logging.getLogger().handlers)


class Collector(logging.Handler):
    """Base class of log handlers that keep what drivetrain logs and prints, without displaying anything."""

    def add_line(self, text: str) -> None:
        """Record a text, such as a table, that drivetrain prints instead of logging.

        Args:
            text: The line, which may contain line breaks.
        """


def collect(text: str) -> None:
    for handler in _RUN.handlers:
        if isinstance(handler, Collector):
            handler.add_line(text)


def logs_json() -> bool:
    """Return True if this process writes its log as JSON."""
    name = os.environ.get(LOG_FORMAT_VARIABLE) or LOG_FORMATS[0]
    if name not in LOG_FORMATS:
        raise ConfigurationError(
            f"{LOG_FORMAT_VARIABLE}={name!r} is not a log format. Allowed: {', '.join(LOG_FORMATS)}."
        )
    return name == "json"


class RankLogger(_Adapter):
    """Logger that by default logs on the main process only."""

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
        """Log a message on the main process, or on all processes if requested.

        Args:
            level: Level of the message.
            msg: The message, with `%` placeholders for `args`.
            *args: Values for the placeholders.
            main_process_only: Log on rank 0 only.
            in_order: Log on all processes, in rank order. All processes must call it.
            **kwargs: Other arguments of `logging.Logger.log`.
        """
        if not in_order and not self.isEnabledFor(level):
            return
        rank, world_size = rank_and_world_size()
        if world_size > 1 and (in_order or not main_process_only):
            msg = f"[rank {rank}] {msg}"
        elif rank != 0:
            return
        if isinstance(msg, str):
            msg = shown(msg)
        # Arguments, such as file names, may contain credentials or control characters.
        args = tuple(shown(each) if isinstance(each, str) else each for each in args)
        # Log records must name the caller's line instead of this one.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        # With in_order, every rank joins every barrier, so that differing log levels cannot block a rank.
        for turn in range(world_size) if in_order else (rank,):
            if turn == rank:
                self.logger.log(level, msg, *args, **kwargs)
            if in_order:
                state = PartialState.existing()
                if state is not None:
                    state.wait_for_everyone()
                else:
                    barrier()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning unless an equal one has been logged before.

        Args:
            msg: The message.
            *args: Values for its placeholders.
            **kwargs: Arguments of `log`.
        """
        if self._is_new(logging.WARNING, msg, args):
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def info_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log an info message unless an equal one has been logged before.

        Args:
            msg: The message.
            *args: Values for its placeholders.
            **kwargs: Arguments of `log`.
        """
        if self._is_new(logging.INFO, msg, args):
            self.log(logging.INFO, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    def _is_new(self, level: int, msg: object, args: tuple[object, ...]) -> bool:
        key = (level, str(msg), repr(args) if args else "")
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


class _JSONHandler(logging.Handler):
    """Handler that prints each record as one JSON object per line."""

    def emit(self, record: logging.LogRecord) -> None:
        known = {name: getattr(record, name) for name in ("epoch", "step", "values") if hasattr(record, name)}
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "rank": rank_and_world_size()[0],
            "message": record.getMessage(),
            **known,
        }
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        print_text(json.dumps(line, default=str))


class _FallbackHandler(logging.Handler):
    """Handler that prints records to stderr if logging is not configured.

    Without it, Python prints only warnings and errors, whatever the logger's level. It handles one logger's records
    only, so that no line is printed twice.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == self._name and not logging.getLogger().handlers:
            print_text(self.format(record), file=sys.stderr)


def _parse_level(level: str | int, source: str) -> int:
    if isinstance(level, int):
        return level
    name = level.upper()
    if name not in _LEVELS:
        raise ConfigurationError(
            f"{source}={level!r} is not a log level. Allowed: {', '.join(_LEVELS)}.{nearest(name, _LEVELS)}",
        )
    return int(getattr(logging, name))


def rank_and_world_size() -> tuple[int, int]:
    # (0, 1) if the environment variables of the process are invalid.
    state = PartialState.existing()
    try:
        environment = state.environment if state is not None else ProcessEnvironment.detect()
    except DrivetrainError:
        return 0, 1
    return environment.rank, environment.world_size


# The levels of Python's own default would hide the lines of a run from every handler that the program adds.
_RUN = logging.getLogger("drivetrain")
if _RUN.level == logging.NOTSET:
    _RUN.setLevel(logging.INFO)
if logs_json():
    _RUN.addHandler(_JSONHandler())
