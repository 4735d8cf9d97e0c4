"""`ProgressBar`: what scripts that draw their own progress inherit from."""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain.callbacks import Callback
from drivetrain.callbacks.progress_bar import TQDMProgressBar as CoreProgressBar
from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.pytorch.loggers.logger import DummyLogger

__all__ = ["ProgressBar", "get_standard_metrics"]


class ProgressBar(Callback, metaclass=StandsFor, original=CoreProgressBar):
    """A callback that shows how far a run is: titles and totals for it, and the values beside them.

    What the Trainer shows by itself counts as one.
    """

    is_progress_bar: ClassVar[bool] = True
    runs_last_at_epoch_end: ClassVar[bool] = True
    saves_within_steps = False

    def __init__(self) -> None:
        self._trainer: Any = None
        self._loader: int | None = None  # the one whose batches were shown last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

    @property
    def trainer(self) -> Any:
        """The Trainer that runs."""
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no trainer before a run begins.")
        return self._trainer

    # on and off

    def enable(self) -> None:
        """Show progress; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__}.enable")

    def disable(self) -> None:
        """Show nothing, which the Trainer asks for on all processes but the first; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__}.disable")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    # titles

    @property
    def sanity_check_description(self) -> str:
        """The title of the validation batches before training."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """The title of an epoch, before its first batch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """The title of a validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """The title of a test."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """The title of a prediction."""
        return "Predicting"

    # totals

    @property
    def total_train_batches(self) -> float:
        """Batches of an epoch, or steps left where those alone end the run; infinite where that is not known."""
        trainer = self.trainer
        batches: float = trainer.num_training_batches
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            batches = min(batches, trainer.max_steps - trainer.global_step)
        return batches

    @property
    def total_val_batches(self) -> float:
        """Batches of all validation loaders; 0 where the epoch under way ends without a validation."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch or 1
        validates = not trainer.training or (trainer.current_epoch + 1) % every == 0
        return sum(trainer.num_val_batches) if validates else 0

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Batches of the validation loader in turn."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of the test loader in turn."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Batches of the prediction loader in turn."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, sizes: list[float]) -> float:
        return sizes[self._loader or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether a batch is the first of its loader, and remember the loader."""
        changed = self._loader != dataloader_idx
        self._loader = dataloader_idx
        return changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget which loader was shown last."""
        self._loader = None

    # values

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return what is shown beside the progress; override it to show something else."""
        shown = dict(trainer.progress_bar_metrics)
        return {**get_standard_metrics(trainer), **shown}


class SwitchedBar(ProgressBar):
    """A progress bar that is on or off, and draws after so many batches."""

    def __init__(self, refresh_rate: int) -> None:
        super().__init__()
        self._refresh_rate = refresh_rate
        self._is_on = True

    @property
    def refresh_rate(self) -> int:
        """After how many batches it draws."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether it draws."""
        return self._is_on and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether it does not draw."""
        return not self.is_enabled

    def enable(self) -> None:
        self._is_on = True

    def disable(self) -> None:
        self._is_on = False


def get_standard_metrics(trainer: Any) -> dict[str, Any]:
    """Return `{"v_num": version}` of the first logger, or an empty dict if it has no version."""
    found = [each for each in trainer.loggers if not isinstance(each, DummyLogger)]
    version = getattr(found[0], "version", None) if found else None
    if version is None or version == "":
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}
