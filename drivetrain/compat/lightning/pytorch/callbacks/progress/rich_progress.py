"""`RichProgressBar`: progress bars of the package rich."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from typing import Any, ClassVar

from drivetrain.callbacks import Callback, RichModelSummary
from drivetrain.callbacks.rich_progress_bar import RichProgressBar as CoreProgressBar
from drivetrain.callbacks.rich_progress_bar import RichProgressBarTheme, make_console, require_rich
from drivetrain.compat.instances import StandsFor
from drivetrain.compat.lightning.pytorch.callbacks.progress.progress_bar import SwitchedBar

if find_spec("rich") is not None:
    from rich.progress import Progress, Task, TaskID, TextColumn

    from drivetrain.compat.lightning.pytorch.callbacks.progress.rich_columns import (
        BatchesProcessedColumn,
        CustomBarColumn,
        CustomProgress,
        CustomTimeColumn,
        MetricsTextColumn,
        ProcessingSpeedColumn,
    )

    __all__ = [
        "BatchesProcessedColumn",
        "CustomBarColumn",
        "CustomProgress",
        "CustomTimeColumn",
        "MetricsTextColumn",
        "ProcessingSpeedColumn",
        "Progress",
        "RichProgressBar",
        "RichProgressBarTheme",
    ]

SECONDS_BETWEEN = 0.1
"""The least time between two drawings of batches."""


class RichProgressBar(SwitchedBar, metaclass=StandsFor, original=CoreProgressBar):
    """Progress bars of rich, one per pass over a data loader.

    Attributes:
        progress: rich's `Progress` of the current or last run, or None.
        theme: Styles of the columns.
        train_progress_bar_id: rich's task ID of the training epoch, or None. It is kept after the run.
        val_sanity_progress_bar_id: Task ID of the sanity check, or None.
        val_progress_bar_id: Task ID of the validation, or None.
        test_progress_bar_id: Task ID of the test, or None.
        predict_progress_bar_id: Task ID of the prediction, or None.
    """

    summary_type: ClassVar[type[Callback]] = RichModelSummary

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),  # noqa: B008
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_rich("RichProgressBar")
        super().__init__(refresh_rate)
        self._leave = leave
        self._console_options = dict(console_kwargs or {})
        self.theme = theme
        self.progress: CustomProgress | None = None
        self._is_live = False
        self._drawn_at = 0.0
        self._values: MetricsTextColumn | None = None
        self._forget_rows()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None, "_values": None, "_is_live": False}

    def _forget_rows(self) -> None:
        self.train_progress_bar_id: TaskID | None = None
        self.val_sanity_progress_bar_id: TaskID | None = None
        self.val_progress_bar_id: TaskID | None = None
        self.test_progress_bar_id: TaskID | None = None
        self.predict_progress_bar_id: TaskID | None = None

    # the rows

    @property
    def train_progress_bar(self) -> Task:
        """Task in rich for the training epoch."""
        return self._row(self.train_progress_bar_id)

    @property
    def val_sanity_check_bar(self) -> Task:
        """Task in rich for the sanity check."""
        return self._row(self.val_sanity_progress_bar_id)

    @property
    def val_progress_bar(self) -> Task:
        """Task in rich for the validation."""
        return self._row(self.val_progress_bar_id)

    @property
    def test_progress_bar(self) -> Task:
        """Task in rich for the test."""
        return self._row(self.test_progress_bar_id)

    def _row(self, number: TaskID | None) -> Task:
        if self.progress is None or number is None:
            raise TypeError("RichProgressBar has no such row before that stage has begun.")
        return self.progress.tasks[number]

    def configure_columns(self, trainer: Any) -> list[Any]:
        """Return rich's columns except the metrics, which come last. Override it to change them."""
        theme = self.theme
        return [
            TextColumn("[progress.description]{task.description}", style=theme.description or "none"),
            CustomBarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            BatchesProcessedColumn(style=theme.batch_progress),
            CustomTimeColumn(style=theme.time),
            ProcessingSpeedColumn(style=theme.processing_speed),
        ]

    def refresh(self, hard: bool = False) -> None:
        """Redraw the bars, unless they were drawn a moment ago. With `hard`, always."""
        now = time.monotonic()
        if self.progress is not None and self._is_live and (hard or now - self._drawn_at >= SECONDS_BETWEEN):
            self._drawn_at = now
            self.progress.refresh()

    # shared by all stages

    def _open(self, trainer: Any) -> None:
        if self.is_disabled or self._is_live:
            return
        self._forget_rows()
        theme = self.theme
        self._values = MetricsTextColumn(theme.metrics, theme.metrics_text_delimiter, theme.metrics_format)
        columns = [*self.configure_columns(trainer), self._values]
        self.progress = CustomProgress(*columns, auto_refresh=False, console=make_console(**self._console_options))
        self.progress.start()
        self._is_live = True

    def _close(self) -> None:
        if self._is_live and self.progress is not None:
            self._is_live = False
            self.progress.stop()

    def _begin_loader(self, name: str, row: TaskID | None, title: str, dataloader_idx: int) -> TaskID | None:
        """Reset the row of a loader, or add one. Return the row's ID, or None if bars are off."""
        if not self.has_dataloader_changed(dataloader_idx) or self.progress is None or not self._is_live:
            return row
        total = _known(getattr(self, f"total_{name}_batches_current_dataloader"))
        if row is None:
            return self.progress.add_task(title, total=total)
        self.progress.reset(row, total=total, description=title, visible=True)
        return row

    def _advance(self, row: TaskID | None, batch_idx: int) -> bool:
        """Advance a row at every `refresh_rate` batches. Return True if the row was redrawn."""
        if row is None or self.progress is None or self.is_disabled:
            return False
        done, total = batch_idx + 1, self.progress.tasks[row].total
        if done % self._refresh_rate and done != total:
            return False
        self.progress.update(row, completed=done)
        self.refresh(hard=done == total)
        return True

    def _hide(self, row: TaskID | None) -> None:
        if row is not None and self.progress is not None and self._is_live:
            self.progress.update(row, visible=False)

    def _update_metrics(self, trainer: Any, pl_module: Any) -> None:
        if self.is_disabled or self._values is None:
            return
        self._values.task_id = self.train_progress_bar_id
        self._values.update(self.get_metrics(trainer, pl_module))

    # training

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(trainer)

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._hide(self.val_sanity_progress_bar_id)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.is_disabled or self.progress is None:
            return
        last = trainer.max_epochs
        of = f"/{last - 1}" if last is not None and last > 0 else ""
        title, total = f"Epoch {trainer.current_epoch}{of}", _known(self.total_train_batches)
        if self.train_progress_bar_id is not None and self._leave:
            self._close()
            self._open(trainer)
        if self.train_progress_bar_id is None:
            self.train_progress_bar_id = self.progress.add_task(title, total=total)
        else:
            self.progress.reset(self.train_progress_bar_id, total=total, description=title, visible=True)
        self.refresh()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._update_metrics(trainer, pl_module)
        self._advance(self.train_progress_bar_id, batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._update_metrics(trainer, pl_module)
        self.refresh(hard=True)

    # evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(trainer)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            title, row = self.sanity_check_description, self.val_sanity_progress_bar_id
            self.val_sanity_progress_bar_id = self._begin_loader("val", row, title, dataloader_idx)
        else:
            title, row = self.validation_description, self.val_progress_bar_id
            self.val_progress_bar_id = self._begin_loader("val", row, title, dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        checks = trainer.sanity_checking
        self._advance(self.val_sanity_progress_bar_id if checks else self.val_progress_bar_id, batch_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._update_metrics(trainer, pl_module)
            if not trainer.sanity_checking:
                self._hide(self.val_progress_bar_id)
        self.reset_dataloader_idx_tracker()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(trainer)

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        row = self.test_progress_bar_id
        self.test_progress_bar_id = self._begin_loader("test", row, self.test_description, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(self.test_progress_bar_id, batch_idx)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(trainer)

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        row = self.predict_progress_bar_id
        self.predict_progress_bar_id = self._begin_loader("predict", row, self.predict_description, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(self.predict_progress_bar_id, batch_idx)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self.reset_dataloader_idx_tracker()

    # the end

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()


def _known(total: float) -> float | None:
    """Return the number of batches, or None if it is infinite."""
    return total if math.isfinite(total) else None
