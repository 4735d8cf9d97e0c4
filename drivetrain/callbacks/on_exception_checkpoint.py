"""Save a checkpoint when an exception ends the run."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.assembly import all_arrive
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

PATIENCE = timedelta(seconds=3)
"""How long a process that raised waits for all others to have raised too."""


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when an exception ends `fit`, from which the run can be resumed.

    What is saved is the last finished step, so that the step which raised is done again. Of several processes all have
    to raise within three seconds: where one fails alone, the others are busy elsewhere and nothing can be saved.

    Args:
        dirpath: The directory that the checkpoint is saved in.
        filename: Its name there, without the extension `.ckpt`. An older checkpoint of this name is replaced.

    Raises:
        ConfigurationError: If the name is empty.

    Example:
        ```python
        from drivetrain import OnExceptionCheckpoint, Trainer

        trainer = Trainer(callbacks=[OnExceptionCheckpoint("checkpoints")], logger=False)
        ```
    """

    saves_checkpoints: ClassVar[bool] = True

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError("OnExceptionCheckpoint(filename=''): give the checkpoint a name.", code="DT-002")
        self.dirpath = os.fspath(dirpath)
        self.filename = filename
        self._fits = 0
        self._training = False

    @property
    def ckpt_path(self) -> str:
        """The checkpoint's path."""
        return os.path.join(self.dirpath, f"{self.filename}.ckpt")

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._fits += 1
        self._training = True

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        # A checkpoint that could not be written, or one for a resume that is there already, needs no second.
        if not self._training or isinstance(exception, CheckpointError) or not isinstance(exception, Exception):
            return
        if not all_arrive(f"OnExceptionCheckpoint/{self.ckpt_path}/{self._fits}/{trainer.global_step}", PATIENCE):
            logger.warning("OnExceptionCheckpoint: not all processes raised, so no checkpoint can be saved.")
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except DrivetrainError as error:
            logger.error(f"OnExceptionCheckpoint: {error}")  # the run ends with its own

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._training = False
