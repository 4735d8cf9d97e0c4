"""`Checkpoint`: what all callbacks that write checkpoints are."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from drivetrain.callbacks import Callback


class Checkpoint(Callback, ABC):
    """The base of callbacks that write checkpoints; `ModelCheckpoint` counts as one."""

    saves_checkpoints: ClassVar[bool] = True
