"""The exception by which Lightning ends a run that gets SIGTERM."""

from __future__ import annotations

import signal


class SIGTERMException(SystemExit):
    """A scheduler's signal has ended `fit`, which has saved; the process exits with a status that asks for a new start.

    Args:
        *args: The status; that of a process which SIGTERM has ended if none is given.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or (128 + signal.SIGTERM,)))
