"""Show how far a run is."""

from __future__ import annotations

import math
import time
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.progress_display import Display, Stage, make_display, to_numbers
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import say

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

_NEVER = math.inf


class TQDMProgressBar(Callback):
    """Shows epoch, batches, speed, the time left and watched values, on the main process.

    Watched are the values logged with `prog_bar=True` and those that a callback monitors.

    On a terminal or in a notebook a bar is redrawn on a clock: between two redraws a batch reads the clock
    once, and logged tensors are read only when they are shown. Where the output goes to a file or a pipe
    there is one line for each epoch instead, and one a minute within a long one.

    Args:
        refresh_rate: Redraw only after a multiple of so many batches; 0 turns the bar off.
        process_position: Lines to leave free above the bar, for bars of other processes.
        leave: Leave the bar of each epoch on the screen and begin a new one.
        refresh_seconds: The time between two redraws, in seconds.

    Raises:
        ConfigurationError: If a number is negative.

    Example:
        ```python
        from drivetrain import TQDMProgressBar, Trainer

        trainer = Trainer(callbacks=[TQDMProgressBar(leave=True)])
        ```
    """

    saves_within_steps = False

    is_progress_bar: ClassVar[bool] = True
    runs_last_at_epoch_end: ClassVar[bool] = True  # the task may log in its own hook

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        refresh_seconds: float = 0.1,
    ) -> None:
        for name, number in (("refresh_rate", refresh_rate), ("refresh_seconds", refresh_seconds)):
            if number < 0:
                raise ConfigurationError(f"TQDMProgressBar({name}={number}): give 0 or more.", code="DT-002")
        self.refresh_rate: float = refresh_rate
        self._batches_between = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self.refresh_seconds = refresh_seconds
        self._enabled = True
        self._display: Display | None = None  # there is none on other processes, nor between runs
        self._due = _NEVER  # when to redraw, by perf_counter
        self._stages: list[Stage] = []
        self._monitored: list[str] = []
        self._began = (0.0, 0.0)  # when training began, and how much of it was done then
        self._stage = Stage("")  # the innermost one; this one where nothing is shown

    # on and off

    @property
    def is_enabled(self) -> bool:
        """Whether progress is shown on the main process."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show progress, beginning with the next call of the Trainer's fit, validate, test or predict."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False
        self._stop()

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Print text above the bar without breaking it.

        Args:
            *args: What to print.
            sep: What stands between them.
            end: What stands after them.
            file: Where to, such as `sys.stderr`; the standard output if None.
        """
        text = sep.join(map(str, args)) + end
        if self._display is not None:
            self._display.write(text, file)
        else:
            say(text, end="", file=file)

    def get_metrics(self, trainer: Trainer, task: Any) -> dict[str, Any]:
        """Return the values that are shown beside an epoch's batches; override it to show others.

        It is called when something is drawn, on the main process only.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.

        Returns:
            Numbers, tensors or text by name: what was logged with `prog_bar=True`, and what a callback monitors.
        """
        shown = dict(trainer.progress_bar_metrics)
        if self._monitored:
            known = trainer.logged.callback_values()
            shown |= {name: known[name] for name in self._monitored if name in known and name not in shown}
        return shown

    # around everything

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._stop()
        if self.is_enabled and trainer.is_global_zero:
            self._display = self._make_display()
            self._due = perf_counter() + self._display.refresh_seconds

    def _make_display(self) -> Display:
        return make_display(self.refresh_seconds, self.process_position)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self._stop()

    # fit

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        names = (getattr(callback, "monitor", None) for callback in trainer.callbacks)
        self._monitored = [name for name in dict.fromkeys(names) if isinstance(name, str)]
        batches = trainer.num_training_batches
        of_epoch = trainer.progress.batches_in_epoch / batches if batches else 0.0
        self._began = (perf_counter(), share_done(trainer, of_epoch))

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        last = trainer.max_epochs
        of = f"/{last - 1}" if last is not None and last > 0 else ""
        before = trainer.progress.batches_in_epoch
        epoch = Stage(
            f"Epoch {trainer.current_epoch}{of}", [trainer.num_training_batches], is_epoch=True, before=before
        )
        if self._stages and not self.leave:
            epoch.bar = self._stages.pop().bar  # continues in its place
        else:
            self._close_stages()
        self._begin(trainer, epoch)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stage.done = batch_idx + 1
        if perf_counter() >= self._due:
            self._draw(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self._display is not None and self._stages:
            self._estimate(trainer)
            self._display.finish(self._stage, self._values(trainer))

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self._close_stages()

    # evaluation

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        sizes = trainer.num_val_batches
        if trainer.sanity_checking:
            steps = trainer.num_sanity_val_steps
            sizes = sizes if steps < 0 else [min(steps, size) for size in sizes]
            self._begin(trainer, Stage("Sanity check", sizes, passing=True))
        else:
            self._begin(trainer, Stage("Validation", sizes, passing=bool(self._stages)))

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._end(trainer)

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        self._begin(trainer, Stage("Test", trainer.num_test_batches))

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        self._end(trainer)

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        self._begin(trainer, Stage("Predict", trainer.num_predict_batches))

    def on_predict_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: Trainer, task: Task) -> None:
        self._end(trainer)

    # what the hooks have in common

    def _begin(self, trainer: Trainer, stage: Stage) -> None:
        if self._display is None:
            return
        if self._stages:
            self._draw_now(trainer)  # as far as it is now: it stands still for a while
        stage.depth = len(self._stages)
        self._stages.append(stage)
        self._stage = stage
        self._display.open(stage)

    def _evaluated(self, trainer: Trainer, batch_idx: int, dataloader_idx: int) -> None:
        stage = self._stage
        stage.done, stage.loader = batch_idx + 1, dataloader_idx
        if perf_counter() >= self._due:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        """Show how far the innermost stage is; it is due."""
        stage = self._stage
        if self._display is None or stage.done % self._batches_between:
            return
        self._draw_now(trainer)

    def _draw_now(self, trainer: Trainer) -> None:
        assert self._display is not None
        self._estimate(trainer)
        self._display.draw(self._stage, self._values(trainer))
        self._due = perf_counter() + self._display.refresh_seconds

    def _values(self, trainer: Trainer) -> dict[str, float]:
        if not self._stage.is_epoch:
            return {}  # in an evaluation they would be those of the training before it
        return to_numbers(self.get_metrics(trainer, trainer.task))

    def _estimate(self, trainer: Trainer) -> None:
        """Estimate when the run ends from the time that it has taken so far, validations and all."""
        stage, (began, share) = self._stage, self._began
        if not stage.is_epoch or not began:
            return
        total = stage.total
        now = share_done(trainer, stage.all_done / total if total else 0.0)
        taken = perf_counter() - began
        stage.left = taken / (now - share) * (1 - now) if share < now < 1 else None

    def _end(self, trainer: Trainer) -> None:
        """Show how the innermost stage ended, and return to the one around it."""
        if self._display is None or not self._stages:
            return
        self._display.finish(self._stage, self._values(trainer))
        stage = self._stages.pop()
        self._display.close(stage)
        if self._stages:
            self._stage = self._stages[-1]
            self._stage.pause(time.perf_counter() - stage.started)

    def _close_stages(self) -> None:
        while self._stages:
            stage = self._stages.pop()
            if self._display is not None:
                self._display.close(stage)

    def _stop(self) -> None:
        self._close_stages()
        self._display = None
        self._due = _NEVER


def share_done(trainer: Trainer, of_epoch: float) -> float:
    """The share of a run that is done, from 0 to 1: by the nearest of its limits.

    Args:
        trainer: The trainer.
        of_epoch: The share of the epoch under way that is done.
    """
    shares = [trainer.control.share_of_duration]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        shares.append((trainer.current_epoch + of_epoch) / trainer.max_epochs)
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    return min(1.0, max(shares))
