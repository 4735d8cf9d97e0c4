"""Exit codes that a rank passes to its launcher, and the launcher to the scheduler."""

from __future__ import annotations

RESUME_EXIT_CODE = 75
"""Exit code of a preempted run that saved its state and resumes if restarted (`EX_TEMPFAIL` of sysexits.h)."""

HANG_EXIT_CODE = 124
"""Exit code of a run that the launcher ended because a rank made no progress (as for `timeout` in coreutils)."""
