"""What a run takes for loaders, shows to hooks and begins with, as Lightning's does."""

from __future__ import annotations

from typing import Any

from drivetrain.callbacks.base import Stage
from drivetrain.data.combined import is_structure
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer import Task
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.loops.progress import Phase


class LightningConventions(CoreTrainer):
    """`drivetrain.Trainer` with Lightning's conventions, which the mirror's Trainer is made of."""

    def on_task_placed(self, task: Task) -> None:
        """Let a verb begin without gradients, and refuse a checkpoint from after the last epoch that was asked for."""
        task.zero_grad()
        if self.task_run.stage is not Stage.TRAIN or self.task_run.checkpoint_path is None:
            return
        epochs, most = self.progress.epoch + (self.progress.phase is Phase.CLOSING), self.options.max_epochs
        if 0 <= most < epochs:
            raise ConfigurationError(
                f"You restored a checkpoint with current_epoch={epochs}, but you have set Trainer(max_epochs={most}). "
                "Give the number of epochs in all.",
                code="DT-002",
            )

    def holds_loaders(self, given: Any) -> bool:
        """Whether what was given or made is several loaders: a list is, unless it holds numbers or strings."""
        return is_structure(given) and bool(given)

    @property
    def refuses_unknown_keys(self) -> bool:
        """No: there is a warning of them."""
        return False

    @property
    def validates_whole_epochs(self) -> bool:
        """Whether callbacks take it so: 1 as well as 1.0, which are the same to Lightning's."""
        return bool(self.val_check_interval == 1)

    @property
    def validates_when_stopped(self) -> bool:
        """Yes, so that a checkpoint has its score."""
        return True

    @property
    def counts_steps_without_loss(self) -> bool:
        """Yes."""
        return True

    @property
    def repeats_epoch_start(self) -> bool:
        """No: only drivetrain's own callbacks get ready again within an epoch."""
        return False

    @property
    def is_last_batch(self) -> bool:
        """Whether the last batch of an epoch is under way, or was the last that there was."""
        current, progress = self.current, self.progress
        if current.stage is Stage.TRAIN and current.batch_info is not None:
            return super().is_last_batch
        return progress.phase > Phase.BATCHES or (not progress.batches_in_epoch and current.last_epoch[0] > 0)
