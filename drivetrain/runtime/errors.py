"""Exceptions, shortened tracebacks and deprecation warnings of drivetrain.

Every error that drivetrain raises on purpose is a `DrivetrainError`.
"""

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
    """Base class of all exceptions that drivetrain raises deliberately.

    The launcher and notebooks report such an error with a short traceback that omits most of drivetrain's own frames.
    """

    has_short_traceback = True

    def __init__(self, *args: object) -> None:
        # Messages quote file names and URLs, which may contain terminal control characters or passwords.
        super().__init__(*(shown(each) if isinstance(each, str) else each for each in args))

    @property
    def message(self) -> str:
        """The exception's text, as `str(error)` returns it."""
        return str(self)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints for this exception."""
        with short_tracebacks(self, self.__traceback__, of_ours=0):
            show = sys.modules["IPython"].get_ipython().InteractiveTB.structured_traceback
            return show(type(self), self, self.__traceback__)  # type: ignore[no-any-return]


class ConfigurationError(DrivetrainError, ValueError):
    """Error raised if an argument, command-line flag or configuration file has a value that is not allowed.

    Args:
        *args: The message, which lists the allowed values.
        see: A page of the manual to refer to, such as `"precision.md"`.
        code: Deprecated, without effect: errors no longer have codes.
    """

    def __init__(self, *args: object, see: str | None = None, code: str | None = None) -> None:
        warn_ignored("ConfigurationError", "code", code, "Messages have what to do.", since="0.1.0", removed_in="0.3.0")
        if see is not None and args:
            args = (f"{args[0]} See {see} in the manual.", *args[1:])
        super().__init__(*args)


class ArgumentTypeError(ConfigurationError, TypeError):
    """Error raised if an argument has a type that is not allowed."""


class PackageMissingError(ConfigurationError, ModuleNotFoundError):
    """Error raised if a required package is not installed."""


class DeviceNotAvailableError(DrivetrainError, RuntimeError):
    """Error raised if a requested device does not exist on this machine."""


class CollectiveError(DrivetrainError, RuntimeError):
    """Error raised if a collective fails, because processes call different operations or one has exited."""


class CheckpointError(DrivetrainError, RuntimeError):
    """Error raised if a checkpoint is missing, incomplete, damaged or does not fit the run."""


class DataError(DrivetrainError, ValueError):
    """Error raised if data cannot be used as given, for example an empty loader or a batch without a size."""


class InvalidLoaderError(DataError, TypeError):
    """Error raised if an object that is not a data loader is passed as one."""


class TrackerError(DrivetrainError, RuntimeError):
    """Error raised if an experiment tracker cannot start."""


class LaunchError(DrivetrainError, RuntimeError):
    """Error raised if processes could not be started or one of them failed."""


def some_of(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


def nearest(given: str, allowed: Iterable[str]) -> str:
    matches = difflib.get_close_matches(given, list(allowed), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


# The user's line in a stack


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_library(filename: str) -> bool:
    """Return True if a source file belongs to drivetrain, torch or Python itself."""
    if filename.startswith((_PACKAGE, _torch(), "<frozen ")):
        return True
    # Installed packages may lie inside the standard library's folder, but count as user code.
    return filename.startswith(_STANDARD_LIBRARY) and not any(part in filename for part in _INSTALLED)


def in_package(filename: str, folder: str = "") -> bool:
    return filename.startswith(os.path.join(_PACKAGE, folder))


def in_torch(filename: str, folder: str = "") -> bool:
    return filename.startswith(os.path.join(_torch(), folder))


@cache
def _torch() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return os.path.dirname(os.path.abspath(spec.origin)) + os.sep


def user_line() -> str:
    """Return the innermost line of user code on the call stack, for messages: `"train.py:12 in main"`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def shown_path(filename: str) -> str:
    """Shorten a path inside the working directory, for messages."""
    below = os.path.join(os.getcwd(), "")
    return filename.removeprefix(below)


# Short tracebacks


FULL_VARIABLE = "DRIVETRAIN_FULL_TRACEBACK"
"""Environment variable that keeps all frames in tracebacks if it is set to 1."""


@contextmanager
def short_tracebacks(error: BaseException, trace: TracebackType | None, *, of_ours: int = 3) -> Iterator[None]:
    """Hide drivetrain's internal frames in the traceback of a `DrivetrainError`.

    Frames of user code are kept. Tracebacks of other exceptions are not changed. Afterwards all tracebacks are
    restored.

    Args:
        error: The exception.
        trace: The traceback to show for it.
        of_ours: Maximum number of drivetrain's frames to keep.
    """
    links = list(_exception_chain(error))
    before = [link.__traceback__ for link in links]
    error.__traceback__ = trace
    try:
        if _shortens():
            _shorten(links, of_ours)
        yield
    finally:
        for link, whole in zip(links, before, strict=True):
            link.__traceback__ = whole


def _shortens() -> bool:
    return os.environ.get(FULL_VARIABLE, "").lower() not in {"1", "true", "yes", "on"}


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # As Python prints the chain: an explicit cause hides the context.
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _shorten(links: list[BaseException], of_ours: int) -> None:
    is_below = False
    for link in links:
        if is_below:
            # A cause of the error: only user code in it matters, such as a dataset that fails.
            link.__traceback__ = _without_inner_frames(link.__traceback__, of_ours=0)
        elif getattr(link, "has_short_traceback", False):
            link.__traceback__ = _without_inner_frames(link.__traceback__, of_ours)
            is_below = True


def _without_inner_frames(trace: TracebackType | None, of_ours: int) -> TracebackType | None:
    # Kept are the frame that raised and those at which user code entered drivetrain. Frames of torch and the standard
    # library between frames of drivetrain are removed with them.
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    # Runs of library frames alternate with runs of user frames.
    runs = [list(run) for _, run in groupby(frames, _is_library_frame)]
    ours = [[frame for frame in run if in_package(frame.tb_frame.f_code.co_filename)] for run in runs]
    entered = [run[0] for run in ours if run]
    raised = ours[-1][-1:] if ours else []
    # The frame that raised may be deep inside: keep the frame at which user code entered as well.
    if raised and entered[-1] is not raised[0]:
        raised = [entered[-1], *raised]
    kept = {id(frame) for frame in [*raised[::-1], *entered][:of_ours]}
    shown: TracebackType | None = None
    for run, own in zip(reversed(runs), reversed(ours), strict=True):
        for frame in reversed(run):
            if not own or id(frame) in kept:
                shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def _is_library_frame(trace: TracebackType) -> bool:
    code = trace.tb_frame.f_code
    # Methods that dataclasses generate have no file, but belong to the module that defines them.
    generated = code.co_filename == "<string>" and trace.tb_frame.f_globals.get("__name__", "").startswith(
        "drivetrain."
    )
    return generated or is_library(code.co_filename)


def hide_inner_frames(error: BaseException) -> None:
    """Leave out drivetrain's and torch's frames from the traceback of an error that IPython prints.

    IPython and its debugger skip frames that have a local variable `__tracebackhide__`. `%xmode show` prints them.
    Has no effect outside IPython.
    """
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None or not _shortens():
        return
    for link in _exception_chain(error):
        trace = link.__traceback__
        while trace is not None:
            # The locals of a module are its namespace, which must not change.
            if trace.tb_frame.f_code.co_flags & inspect.CO_OPTIMIZED and _is_library_frame(trace):
                trace.tb_frame.f_locals["__tracebackhide__"] = True
            trace = trace.tb_next


# Unknown keyword arguments


F = TypeVar("F", bound=Callable[..., Any])


class UnknownArgumentError(ConfigurationError, TypeError):
    """Error raised if a function is called with a keyword argument that it does not accept."""


def known_keywords(function: F) -> F:
    """Decorate a function so that an unknown keyword raises an error with a suggestion.

    Errors in the function get short tracebacks in notebooks.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return function
    taken = {each.name: None for each in parameters if each.kind is not each.VAR_POSITIONAL}

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if keywords.keys() <= taken.keys():
            try:
                return function(*args, **keywords)
            except Exception as error:
                hide_inner_frames(error)
                raise
        unknown = next(name for name in keywords if name not in taken)
        raise unknown_argument(function.__qualname__.removesuffix(".__init__"), unknown, taken)

    return call  # type: ignore[return-value]


def unknown_argument(function: str, unknown: str, taken: Collection[str]) -> UnknownArgumentError:
    guess = nearest(unknown, taken)
    known = "" if guess else f" It takes {', '.join(name for name in taken if name != 'self')}."
    return UnknownArgumentError(f"{function}() takes no argument {unknown!r}.{guess}{known}")


class MadeAgain:
    # Pickled as the arguments of the constructor, which is called again on loading.

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


# Deprecations


class DrivetrainDeprecationWarning(FutureWarning):
    """Warning about a deprecated feature.

    The message names its replacement and the version that removes it. It is a `FutureWarning`, because Python hides a
    `DeprecationWarning` that is raised in an imported module.
    """


def deprecated(*, since: str, removed_in: str, use: str | None = None) -> Callable[[F], F]:
    """Decorate a function or class so that each call warns of its removal."""
    until = _until(since, removed_in)

    def mark(target: F) -> F:
        message = f"{target.__qualname__} is deprecated {until}.{f' Use {use}.' if use else ''}"
        if inspect.isclass(target):
            # Replacing the class by a function would break isinstance checks and subclasses.
            target.__init__ = _warning(target.__init__, message)  # type: ignore[method-assign]
            return target
        return _warning(target, message)

    return mark


def warn_ignored(
    function: str, name: str, value: object, hint: str, *, since: str, removed_in: str, stacklevel: int = 4
) -> None:
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


# Damaged checkpoints


class DamagedCheckpointError(CheckpointError):
    """Error raised if a checkpoint is missing, incomplete or damaged."""
