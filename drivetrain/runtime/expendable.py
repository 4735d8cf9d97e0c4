"""The mark of a process that the others of its run can do without: one that takes items from a work queue.

The launcher ends all processes when one fails, since they would wait for it. Where a process dies that has left this
mark, it lets the others run: what the process had is given to one of them. Imports nothing of torch.
"""

from __future__ import annotations

import contextlib
import os

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file in which a process leaves its failure for its launcher; the mark is beside it."""

_LEFT_A_QUEUE = "_drivetrain_left_work_queue"


def set_expendable(expendable: bool) -> None:
    """Leave the mark, or take it away; does nothing where no launcher reads it.

    Args:
        expendable: Whether the others can do without this process from now on.
    """
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if not error_file:
        return
    with contextlib.suppress(OSError):
        if expendable:
            open(_mark(error_file), "wb").close()
        else:
            os.unlink(_mark(error_file))


def is_expendable(error_file: str) -> bool:
    """Whether a process has left the mark.

    Args:
        error_file: Where it leaves its failure.
    """
    return os.path.exists(_mark(error_file))


def mark_left_queue(error: BaseException) -> None:
    """Mark an exception as one that ended this process's part of a work queue."""
    setattr(error, _LEFT_A_QUEUE, True)


def has_left_queue(error: BaseException | None) -> bool:
    """Whether an exception, or one that it follows from, ended this process's part of a work queue."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if hasattr(error, _LEFT_A_QUEUE):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _mark(error_file: str) -> str:
    return f"{error_file}.expendable"
