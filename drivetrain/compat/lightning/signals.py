"""`SIGTERMException`, with which Lightning ends a run after SIGTERM."""

from __future__ import annotations

import signal


class SIGTERMException(SystemExit):
    """Raised when a signal has stopped `fit` after a checkpoint. The exit code requests a restart.

    Args:
        *args: The exit code, by default that of a process which SIGTERM terminated.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or (128 + signal.SIGTERM,)))
