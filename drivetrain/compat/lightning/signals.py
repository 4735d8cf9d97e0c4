"""The exception by which Lightning ends a run that gets SIGTERM."""

from __future__ import annotations


class SIGTERMException(SystemExit):
    """Nothing raises it here: a run that a signal ends saves, and exits with a status that asks for a new start."""
