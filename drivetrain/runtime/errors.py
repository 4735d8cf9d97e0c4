"""The exception family: every error that drivetrain raises on purpose is a `DrivetrainError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DrivetrainError(Exception):
    """Base class of every error raised on purpose by drivetrain."""


class ConfigurationError(DrivetrainError, ValueError):
    """An argument, flag or file asks for something that cannot be; the message lists what can."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of a type that it cannot be."""


class PackageMissingError(ConfigurationError, ModuleNotFoundError):
    """A package is not installed; the message has the line that installs it."""


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


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest allowed spelling, or an empty string."""
    matches = difflib.get_close_matches(given, list(allowed), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
