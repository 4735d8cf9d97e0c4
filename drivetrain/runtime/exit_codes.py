"""Exit codes by which a rank informs its launcher, and the launcher its scheduler, of more than a failure."""

from __future__ import annotations

RESUME_EXIT_CODE = 75
"""This run was preempted and has saved its state: started again, it resumes. (`EX_TEMPFAIL` of sysexits.h.)"""

HANG_EXIT_CODE = 124
"""The launcher ended a run in which a rank made no progress. (The code of `timeout` in coreutils.)"""
