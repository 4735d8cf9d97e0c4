"""Lightning's enums for the state of a Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.enums import LightningEnum
from drivetrain.trainer.loops.run_control import StopReason

if TYPE_CHECKING:
    from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer

_CUT_SHORT = (StopReason.INTERRUPTED, StopReason.PREEMPTED, StopReason.FAILED)


class TrainerStatus(LightningEnum):
    """Progress of `fit`, `validate`, `test` or `predict`."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """True if the run has finished or was interrupted."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(LightningEnum):
    """Method of the Trainer that is running."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """Stage of the run."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """True for validation, test and the sanity check."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """Prefix of the stage's data loader names, such as `"val"`."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else str(self.value)


@dataclass
class TrainerState:
    """State of a Trainer: method, stage and status.

    Attributes:
        status: Progress of the current or last method.
        fn: The current or last method, or None before the first.
        stage: The current stage, or None if nothing runs.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """True if the run has finished."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True if the run has finished or was interrupted."""
        return self.status.stopped


def state_of(trainer: Trainer, running: Stage | None) -> TrainerState:
    """Return the current state of a Trainer."""
    verb = running or trainer.task_run.stage
    if verb is None:
        return TrainerState()
    fn = TrainerFn(str(verb.verb))
    if running is not None and trainer.stage is None:
        return TrainerState(TrainerStatus.RUNNING, fn, RunningStage(str(verb)))
    if trainer.stage is None:
        cut_short = trainer.control.reason in _CUT_SHORT and verb is Stage.TRAIN
        return TrainerState(TrainerStatus.INTERRUPTED if cut_short else TrainerStatus.FINISHED, fn)
    stage = RunningStage.SANITY_CHECKING if trainer.sanity_checking else RunningStage(str(trainer.stage))
    return TrainerState(TrainerStatus.RUNNING, fn, stage)
