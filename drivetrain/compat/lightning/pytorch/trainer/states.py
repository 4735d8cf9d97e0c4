"""What a Trainer does, in Lightning's words."""

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
    """How far a verb has come."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(LightningEnum):
    """A verb of the Trainer."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """What runs within a verb."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it evaluates."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """The word in the names of its loaders."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else str(self.value)


@dataclass
class TrainerState:
    """What a Trainer does.

    Attributes:
        status: How far the verb has come.
        fn: The verb, the last one after it; None before the first.
        stage: What runs now; None between two verbs.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the verb has ended by itself."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""
        return self.status.stopped


def state_of(trainer: Trainer, running: Stage | None) -> TrainerState:
    """What a Trainer does."""
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
