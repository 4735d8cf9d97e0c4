"""The exception family: every error that drivetrain raises on purpose is a `DrivetrainError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from drivetrain.runtime.terminal import shown
from drivetrain.runtime.tracebacks import short_lines

NO_CODE = "DT-000"


class DrivetrainError(Exception):
    """Base class of every error raised on purpose by drivetrain.

    The launcher's reports and notebooks show it with a traceback that leaves out most of drivetrain's own frames.
    """

    has_short_traceback = True

    def __init__(self, *args: object) -> None:
        # Messages quote files, whose names may hold what moves a terminal's cursor, and addresses with passwords.
        super().__init__(*(shown(each) if isinstance(each, str) else each for each in args))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the cell."""
        return short_lines(self)

    @property
    def message(self) -> str:
        """The message alone, for a message that quotes it."""
        return str(self)


class ConfigurationError(DrivetrainError, ValueError):
    """An argument, flag or file asks for something that cannot be; the message lists what can.

    Args:
        *args: The message.
        code: Names the cause, such as `"DT-012"`: `drivetrain explain DT-012` and the page of error codes describe it
            and what to do. The class's own if None.

    Attributes:
        code: The code; `"DT-000"` where none was given, as in errors that other packages raise.
    """

    code: str = NO_CODE

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        """The message without the line that names its code."""
        return super().__str__()

    def __str__(self) -> str:
        if self.code == NO_CODE:
            return self.message
        return f"{self.message}\n[{self.code}: drivetrain explain {self.code}]"


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of a type that it cannot be."""

    code = "DT-003"


class PackageMissingError(ConfigurationError, ModuleNotFoundError):
    """A package is not installed; the message has the line that installs it."""

    code = "DT-013"


class DeviceNotAvailableError(DrivetrainError, RuntimeError):
    """A device was named that this machine does not have."""


class CollectiveError(DrivetrainError, RuntimeError):
    """Processes disagree about a collective, or a peer is gone."""


class CheckpointError(DrivetrainError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or does not fit the run."""


class DataError(DrivetrainError, ValueError):
    """Data cannot be used as given: an empty loader, a batch without a size."""


class InvalidLoaderError(DataError, TypeError):
    """What was given as a loader is none."""


class TrackerError(DrivetrainError, RuntimeError):
    """An experiment tracker cannot be started; the message names what is missing and what to do."""


class LaunchError(DrivetrainError, RuntimeError):
    """Processes could not be started, or one of them failed."""


def some_of(names: Sequence[str]) -> str:
    """Join the first eight names, and how many more there are.

    Args:
        names: The names.
    """
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest allowed spelling, or an empty string."""
    matches = difflib.get_close_matches(given, list(allowed), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
