"""`Checkpoint`: base class of callbacks that write checkpoints."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from drivetrain.callbacks import Callback


class Checkpoint(Callback, ABC):
    """Base class of callbacks that write checkpoints. `ModelCheckpoint` is an instance."""

    saves_checkpoints: ClassVar[bool] = True
