"""The exception family: every error that drivetrain raises on purpose is a `DrivetrainError`."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain.runtime.terminal import shown


class DrivetrainError(Exception):
    """Base class of every error raised on purpose by drivetrain.

    The launcher's reports show it with a traceback that leaves out most of drivetrain's own frames.
    """

    has_short_traceback = True

    def __init__(self, *args: object) -> None:
        # Messages quote files, whose names may hold what moves a terminal's cursor, and addresses with passwords.
        super().__init__(*(shown(each) if isinstance(each, str) else each for each in args))

    @property
    def message(self) -> str:
        """The message alone, for a message that quotes it."""
        return str(self)


class ConfigurationError(DrivetrainError, ValueError):
    """An argument, flag or file asks for something that cannot be; the message lists what can.

    Args:
        *args: The message.
        see: A page of the manual, such as `"precision.md"`, which the message then names.
        code: Deprecated and without effect: errors have no codes any more.
    """

    def __init__(self, *args: object, see: str | None = None, code: str | None = None) -> None:
        warn_ignored("ConfigurationError", "code", code, "Messages have what to do.", since="0.1.0", removed_in="0.3.0")
        if see is not None and args:
            args = (f"{args[0]} See {see} in the manual.", *args[1:])
        super().__init__(*args)


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


def some_of(names: Sequence[str]) -> str:
    """Join the first eight names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest allowed spelling, or an empty string."""
    matches = difflib.get_close_matches(given, list(allowed), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


# Which line of a stack is the user's: what is inside drivetrain, torch and the standard library is not


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_library(filename: str) -> bool:
    """Whether a file belongs to drivetrain, torch, the standard library or the interpreter."""
    if filename.startswith((_PACKAGE, _torch(), "<frozen ")):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and not any(part in filename for part in _INSTALLED)


def in_package(filename: str, folder: str = "") -> bool:
    """Whether a file is in a folder of drivetrain, such as `"runtime"`."""
    return filename.startswith(os.path.join(_PACKAGE, folder))


def in_torch(filename: str, folder: str = "") -> bool:
    """Whether a file is in a folder of torch, such as `"distributed"`."""
    return filename.startswith(os.path.join(_torch(), folder))


@cache
def _torch() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return os.path.dirname(os.path.abspath(spec.origin)) + os.sep


def user_line() -> str:
    """Return the innermost line of the user's code that is running, as `"train.py:12 in main"`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def shown_path(filename: str) -> str:
    """Shorten a path to one relative to the working directory where it lies below it."""
    below = os.path.join(os.getcwd(), "")
    return filename.removeprefix(below)


# Short tracebacks: those of a `DrivetrainError` end at the user's line, with three frames of drivetrain at most


FULL_VARIABLE = "DRIVETRAIN_FULL_TRACEBACK"
"""Set to 1, it lets tracebacks have all frames."""


@contextmanager
def short_tracebacks(error: BaseException, trace: TracebackType | None) -> Iterator[None]:
    """Leave drivetrain's inner frames out of an exception, and of those that led to it, while the body runs.

    User code's frames stay. An exception that is no `DrivetrainError`, nor led to one, keeps all frames.
    """
    links = list(_links(error))
    before = [link.__traceback__ for link in links]
    error.__traceback__ = trace
    try:
        if os.environ.get(FULL_VARIABLE, "").lower() not in {"1", "true", "yes", "on"}:
            _shorten(links)
        yield
    finally:
        for link, whole in zip(links, before, strict=True):
            link.__traceback__ = whole


def _links(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that Python prints above it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _shorten(links: list[BaseException]) -> None:
    is_below = False
    for link in links:
        if is_below:
            link.__traceback__ = _without(link.__traceback__, of_ours=0)
        elif getattr(link, "has_short_traceback", False):
            link.__traceback__ = _without(link.__traceback__, of_ours=3)
            is_below = True


def _without(trace: TracebackType | None, of_ours: int) -> TracebackType | None:
    """A traceback with the frames of users, and so many of drivetrain: where it was entered, and where it raised.

    Frames of torch and the standard library that lead from one of drivetrain's to another are left out with them.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    runs = [list(run) for _, run in groupby(frames, _is_inner)]
    ours = [[frame for frame in run if in_package(frame.tb_frame.f_code.co_filename)] for run in runs]
    entered = [run[0] for run in ours if run]
    raised = ours[-1][-1:] if ours else []
    if raised and entered[-1] is not raised[0]:
        raised = [entered[-1], *raised]
    kept = {id(frame) for frame in [*raised[::-1], *entered][:of_ours]}
    shown: TracebackType | None = None
    for run, own in zip(reversed(runs), reversed(ours), strict=True):
        for frame in reversed(run):
            if not own or id(frame) in kept:
                shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def _is_inner(trace: TracebackType) -> bool:
    """Whether a frame is drivetrain's, torch's or the standard library's; also in code that a dataclass generates."""
    code = trace.tb_frame.f_code
    generated = code.co_filename == "<string>" and trace.tb_frame.f_globals.get("__name__", "").startswith(
        "drivetrain."
    )
    return generated or is_library(code.co_filename)


# Keyword arguments that a function does not take, and the arguments that an object was made with


F = TypeVar("F", bound=Callable[..., Any])


class UnknownArgumentError(ConfigurationError, TypeError):
    """A function was given a keyword argument that it does not take."""


def known_keywords(function: F) -> F:
    """Let a function refuse keyword arguments that it does not take, with the nearest one that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return function
    taken = {each.name: None for each in parameters if each.kind is not each.VAR_POSITIONAL}

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if keywords.keys() <= taken.keys():
            return function(*args, **keywords)
        unknown = next(name for name in keywords if name not in taken)
        raise unknown_argument(function.__qualname__.removesuffix(".__init__"), unknown, taken)

    return call  # type: ignore[return-value]


def unknown_argument(function: str, unknown: str, taken: Collection[str]) -> UnknownArgumentError:
    """Return the error for a keyword argument that a function does not take."""
    guess = nearest(unknown, taken)
    known = "" if guess else f" It takes {', '.join(name for name in taken if name != 'self')}."
    return UnknownArgumentError(f"{function}() takes no argument {unknown!r}.{guess}{known}")


class MadeAgain:
    """An object whose pickle holds the arguments of its constructor: the copy is a new one.

    Attributes:
        made_with: The arguments that the object was made with, by position and by name.
    """

    made_with: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            made = super().__new__(cls)
            made.made_with = args, keywords
            return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), *self.made_with)


def _make(kind: type[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return kind(*arguments, **keywords)


# Deprecations: what will be removed warns until a named version, which a test holds


class DrivetrainDeprecationWarning(FutureWarning):
    """Something of drivetrain that a script uses will be removed; the message names the version and what to use.

    A `FutureWarning`, which Python shows by default also where the call is in a module of the script's.
    """


def deprecated(*, since: str, removed_in: str, use: str | None = None) -> Callable[[F], F]:
    """Mark a function, method or class that will be removed: a call warns."""
    until = _until(since, removed_in)

    def mark(target: F) -> F:
        message = f"{target.__qualname__} is deprecated {until}.{f' Use {use}.' if use else ''}"
        if inspect.isclass(target):
            target.__init__ = _warning(target.__init__, message)  # type: ignore[method-assign]
            return target
        return _warning(target, message)

    return mark


def warn_ignored(
    function: str, name: str, value: object, hint: str, *, since: str, removed_in: str, stacklevel: int = 4
) -> None:
    """Warn the caller's caller of an argument that is taken and has no effect any more; do nothing if it is None."""
    if value is not None:
        _warn(f"{function}({name}={value!r}) has no effect {_until(since, removed_in)}. {hint}".rstrip(), stacklevel)


def _until(since: str, removed_in: str) -> str:
    return f"since drivetrain {since} and will be removed in {removed_in}"


def _warning(function: F, message: str) -> F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(message)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _warn(message: str, stacklevel: int = 3) -> None:
    warnings.warn(message, DrivetrainDeprecationWarning, stacklevel=stacklevel)


# What is raised where a checkpoint is not whole


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is missing, incomplete or damaged, or holds what none may hold: an older one may be whole."""
