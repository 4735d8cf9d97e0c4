"""What is raised where a checkpoint is not whole."""

from __future__ import annotations

from drivetrain.runtime.errors import CheckpointError


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is missing, incomplete or damaged, or holds what none may hold: an older one may be whole."""
