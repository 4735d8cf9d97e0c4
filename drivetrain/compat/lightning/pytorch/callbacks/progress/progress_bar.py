"""`ProgressBar`: base class of progress bars that scripts define."""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain.callbacks import Callback
from drivetrain.callbacks.progress_bar import TQDMProgressBar as CoreProgressBar
from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.pytorch.loggers.logger import DummyLogger

__all__ = ["ProgressBar", "get_standard_metrics"]


class ProgressBar(Callback, metaclass=StandsFor, original=CoreProgressBar):
    """Base class of progress bars, with titles, batch totals and metrics.

    The Trainer's default progress bar passes `isinstance`.
    """

    is_progress_bar: ClassVar[bool] = True
    runs_last_at_epoch_end: ClassVar[bool] = True
    saves_within_steps = False

    def __init__(self) -> None:
        self._trainer: Any = None
        self._loader: int | None = None  # the loader shown last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

    @property
    def trainer(self) -> Any:
        """The running Trainer. Raises `TypeError` before a run."""
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no trainer before a run begins.")
        return self._trainer

    # on and off

    def enable(self) -> None:
        """Show progress. Subclasses must implement this."""
        raise NotImplementedError(f"{type(self).__name__}.enable")

    def disable(self) -> None:
        """Hide progress. The Trainer calls this on all ranks but 0. Subclasses must implement it."""
        raise NotImplementedError(f"{type(self).__name__}.disable")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    # titles

    @property
    def sanity_check_description(self) -> str:
        """Title of the sanity check before training."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """Title of a training epoch."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """Title of a validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """Title of a test."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """Title of a prediction run."""
        return "Predicting"

    # totals

    @property
    def total_train_batches(self) -> float:
        """Number of batches in this epoch, limited by `max_steps`. Infinite if unknown."""
        trainer = self.trainer
        batches: float = trainer.num_training_batches
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            batches = min(batches, trainer.max_steps - trainer.global_step)
        return batches

    @property
    def total_val_batches(self) -> float:
        """Number of batches of all validation loaders, 0 if this epoch has no validation."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch or 1
        validates = not trainer.training or (trainer.current_epoch + 1) % every == 0
        return sum(trainer.num_val_batches) if validates else 0

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Number of batches of the current validation loader."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Number of batches of the current test loader."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Number of batches of the current prediction loader."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, sizes: list[float]) -> float:
        return sizes[self._loader or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return True if `dataloader_idx` differs from that of the previous call."""
        changed = self._loader != dataloader_idx
        self._loader = dataloader_idx
        return changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Reset the loader index that `has_dataloader_changed` compares with."""
        self._loader = None

    # values

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return the metrics to show. Override it to show others."""
        shown = dict(trainer.progress_bar_metrics)
        return {**get_standard_metrics(trainer), **shown}


class SwitchedBar(ProgressBar):
    """Progress bar that can be enabled, disabled and refreshed every n batches."""

    def __init__(self, refresh_rate: int) -> None:
        super().__init__()
        self._refresh_rate = refresh_rate
        self._is_on = True

    @property
    def refresh_rate(self) -> int:
        """Number of batches between two refreshes."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """True if the bar is enabled and its refresh rate is not 0."""
        return self._is_on and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """True if the bar does not draw."""
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
