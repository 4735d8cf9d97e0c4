"""Exit codes with which a rank tells its launcher, and the launcher its scheduler, more than that it failed."""

from __future__ import annotations

RESUME_EXIT_CODE = 75
"""This run was preempted and has saved its state: start it again, and it goes on. (`EX_TEMPFAIL` of sysexits.h.)"""
