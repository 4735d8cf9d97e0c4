"""Other ways of writing checkpoints, which are not here."""

from __future__ import annotations

from drivetrain.compat.absent import absent_names
from drivetrain.compat.lightning.reasons import PLUGIN

_ABSENT = ("CheckpointIO", "TorchCheckpointIO", "XLACheckpointIO")

__getattr__ = absent_names(__name__, (PLUGIN, _ABSENT))
