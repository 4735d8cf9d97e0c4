"""Short tracebacks: those of a `DrivetrainError` end at the user's line, with three frames of drivetrain at most.

Reports of the launcher and notebooks leave frames out as they print, so that debuggers and handlers find the whole
traceback in the exception. Plain `python script.py` shows all frames: `sys.excepthook` is left alone. Imports no torch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from types import TracebackType

from drivetrain.runtime.frames import in_package, is_library

FULL_VARIABLE = "DRIVETRAIN_FULL_TRACEBACK"
"""Set to 1, it lets tracebacks have all frames."""

_NOTEBOOK = (f"{os.sep}IPython{os.sep}", f"{os.sep}ipykernel{os.sep}")


def short_lines(error: BaseException) -> list[str]:
    """Compose what IPython shows: the short traceback from the cell on."""
    trace = error.__traceback__
    while trace is not None and any(part in trace.tb_frame.f_code.co_filename for part in _NOTEBOOK):
        trace = trace.tb_next
    with short_tracebacks(error, trace):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()


@contextmanager
def short_tracebacks(error: BaseException, trace: TracebackType | None) -> Iterator[None]:
    """Leave drivetrain's inner frames out of an exception, and of those that led to it, while the body runs.

    User code's frames stay. An exception that is no `DrivetrainError`, nor led to one, keeps all frames.

    Args:
        error: The exception.
        trace: Its traceback, or the part of it that is shown.
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
