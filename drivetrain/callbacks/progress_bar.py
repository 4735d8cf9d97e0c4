"""Callback that shows the progress of a run."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import collect, is_configured, logs_json, report
from drivetrain.runtime.terminal import encodable, is_terminal, print_text

if TYPE_CHECKING:
    from tqdm import tqdm

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Displays


class Stage:
    """Progress of one training epoch or one evaluation, as a progress bar shows it.

    Attributes:
        title: The text before the numbers.
        sizes: The number of batches of each loader, infinite if unknown.
        done: The number of finished batches of the current loader.
        before: The number of batches of the epoch that were finished before the run was resumed. Rates exclude them.
        loader: The index of the current loader.
        passing: True if the bar disappears at the end, because it belongs to an outer stage.
        is_epoch: True for a training epoch, which shows logged values.
        depth: The number of outer stages.
        left: The estimated seconds until the end of the run, or None.
    """

    __slots__ = (
        "bar",
        "before",
        "depth",
        "done",
        "is_epoch",
        "left",
        "loader",
        "passing",
        "paused",
        "sizes",
        "started",
        "title",
    )

    def __init__(
        self, title: str, sizes: Sequence[float] = (), passing: bool = False, is_epoch: bool = False, before: int = 0
    ) -> None:
        self.title = title
        self.sizes = sizes
        self.passing = passing
        self.is_epoch = is_epoch
        self.depth = 0
        self.done = self.before = before
        self.loader = 0
        self.started = time.perf_counter()
        self.paused = 0.0
        self.bar: Any = None
        self.left: float | None = None

    @property
    def left_in_all(self) -> list[str]:
        return [f"{_duration(self.left)} left in all"] if self.left else []

    @property
    def total(self) -> int | None:
        total = sum(self.sizes)
        return int(total) if math.isfinite(total) else None

    @property
    def all_done(self) -> int:
        before = sum(self.sizes[: self.loader])
        return self.done + (int(before) if math.isfinite(before) else 0)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started - self.paused

    @property
    def rate(self) -> float:
        """The number of batches per second in this stage."""
        elapsed = self.elapsed
        return (self.all_done - self.before) / elapsed if elapsed > 0 else 0.0

    def line(self, parts: Sequence[str], values: Mapping[str, float]) -> str:
        return f"{self.title}: {', '.join([*parts, listed(values)] if values else parts)}"

    def summary(self, values: Mapping[str, float]) -> str:
        done, total, elapsed = self.all_done, self.total, self.elapsed
        counted = f"{done} batches" if done == total or not total else f"{done}/{total} batches"
        rate = f" ({self.rate:.4g} it/s)" if elapsed > 0 else ""
        return self.line([f"{counted} in {_duration(elapsed)}{rate}", *self.left_in_all], values)

    def pause(self, seconds: float) -> None:
        self.paused += seconds
        if self.bar is not None:
            # tqdm computes rates from these times.
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds


class Display(Protocol):
    """Protocol of progress displays, such as a bar in a terminal or lines in a log file."""

    refresh_seconds: float

    def open(self, stage: Stage) -> None: ...

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        """Redraw the progress bar with the current position and metric values of a running stage."""

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        """End the display of a stage, with its final progress and metric values."""

    def close(self, stage: Stage) -> None: ...

    def write(self, text: str, file: TextIO | None = None) -> None:
        """Print text without disturbing the progress display."""

    def hidden(self) -> AbstractContextManager[Any]:
        """Return a context manager that hides the progress bar, so that its block can write to the terminal."""


class BarDisplay:
    def __init__(self, refresh_seconds: float, position: int = 0) -> None:
        self.refresh_seconds = refresh_seconds
        self._position = position
        self._bar_type = _bar_type()

    def open(self, stage: Stage) -> None:
        if stage.bar is not None:
            stage.bar.set_description(stage.title, refresh=False)
            stage.bar.set_postfix_str("", refresh=False)
            stage.bar.reset(stage.total)
            # `reset` sets the count to 0, but a resumed epoch begins later.
            stage.bar.initial = stage.bar.n = stage.before
            return
        stage.bar = self._bar_type(
            desc=stage.title,
            total=stage.total,
            initial=stage.before,
            leave=not stage.passing,
            position=self._position + stage.depth,
            **self._width(),
            # The callback decides when to redraw, so tqdm must not skip updates.
            mininterval=0,
            miniters=1,
            file=sys.stdout,
        )

    def _width(self) -> dict[str, Any]:
        try:
            known = os.get_terminal_size(sys.stdout.fileno()).columns > 0
        except (AttributeError, OSError, ValueError):
            known = True  # in a notebook
        return {"dynamic_ncols": True} if known else {"ncols": 80}

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        left = ", ".join(stage.left_in_all)
        counted = f"{stage.title}: 100% {stage.all_done}/{stage.total or ''} "
        # From the most important part to the one that is left out first.
        optional = (_LEAST_BAR + 2, len(" [00:00<00:00, ]"), len("1234.56it/s, "), len(left) + 2)
        count, shown = fit_line(_columns(), len(counted), values, optional)
        if not in_notebook():
            stage.bar.bar_format = (_FORMATS if stage.total else _FORMATS_WITHOUT_TOTAL)[min(count, 3)]
        stage.bar.set_postfix_str(", ".join(filter(None, [shown, left if count == 4 else ""])), refresh=False)
        # `update` redraws the bar only if the count has changed.
        if not stage.bar.update(stage.all_done - stage.bar.n):
            stage.bar.refresh()

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        if not stage.passing:
            self.draw(stage, values)

    def close(self, stage: Stage) -> None:
        if stage.bar is not None:
            stage.bar.close()
            stage.bar = None

    def write(self, text: str, file: TextIO | None = None) -> None:
        stream = file or sys.stdout
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            self._bar_type.write(encodable(text, stream), file=stream, end="")

    def hidden(self) -> AbstractContextManager[Any]:
        return nullcontext() if in_notebook() else self._bar_type.external_write_mode(file=sys.stdout)


class LineDisplay:
    """Progress display for files and pipes, which prints a line now and then."""

    def __init__(self, refresh_seconds: float = 60.0) -> None:
        self.refresh_seconds = refresh_seconds
        self._last_line = time.perf_counter()

    def open(self, stage: Stage) -> None:
        pass

    def draw(self, stage: Stage, values: Mapping[str, float]) -> None:
        if time.perf_counter() - self._last_line < self.refresh_seconds:
            return
        done, total, rate = stage.all_done, stage.total, stage.rate
        parts = [f"{done}/{total} batches" if total else f"{done} batches", f"{rate:.4g} it/s"]
        if total and rate:
            parts.append(f"{_duration((total - done) / rate)} left")
        report(stage.line([*parts, *stage.left_in_all], values), values=dict(values))
        self._last_line = time.perf_counter()

    def finish(self, stage: Stage, values: Mapping[str, float]) -> None:
        if stage.passing:
            return
        if not is_configured():  # the line is logged otherwise
            print_text(stage.summary(values))
        self._last_line = time.perf_counter()

    def close(self, stage: Stage) -> None:
        pass

    def write(self, text: str, file: TextIO | None = None) -> None:
        print_text(text, end="", file=file)

    def hidden(self) -> AbstractContextManager[Any]:
        return nullcontext()


def make_display(refresh_seconds: float, position: int = 0) -> Display:
    if (is_terminal() or in_notebook()) and not logs_json():
        return BarDisplay(refresh_seconds, position)
    return LineDisplay()


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metric values to Python numbers, with one transfer for each device."""
    numbers: dict[str, Any] = dict(metrics)
    by_device: dict[torch.device, list[str]] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(name)
    for names in by_device.values():
        stacked = torch.stack([metrics[name].detach().reshape(()).float() for name in names])
        numbers.update(zip(names, stacked.tolist(), strict=True))
    return numbers


_LEAST_BAR = 10
"""The columns of the narrowest bar that is drawn."""

# Of a bar whose terminal has room for nothing but counts and values, for a bar too, for times, and for the rate.
_FORMATS = (
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt}{postfix}",
    "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
    "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
)
_FORMATS_WITHOUT_TOTAL = (
    "{desc}: {n_fmt}{postfix}",
    "{desc}: {n_fmt}{postfix}",
    "{desc}: {n_fmt} [{elapsed}{postfix}]",
    "{desc}: {n_fmt} [{elapsed}, {rate_fmt}{postfix}]",
)


def fit_line(columns: int, needed: int, values: Mapping[str, float], optional: Sequence[int]) -> tuple[int, str]:
    """Choose which parts of a progress bar fit into one line of a terminal that is `columns` wide.

    Args:
        columns: The width of the terminal.
        needed: The columns of what is always shown, without the values.
        values: The metric values.
        optional: The columns of further parts, the most important first.

    Returns:
        The number of optional parts to show, and the values as text.
    """
    text = listed(values)
    for count in range(len(optional), -1, -1):
        if needed + len(text) + sum(optional[:count]) < columns:
            return count, text
    names = list(values)
    while len(names) > 1 and needed + len(text) >= columns:
        names.pop()
        text = f"{listed({name: values[name] for name in names})}, +{len(values) - len(names)} more"
    return 0, text


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


def listed(values: Mapping[str, float]) -> str:
    """Format metric values as text, such as `loss=0.123, acc=0.9`."""
    return ", ".join(f"{name}={_number(value)}" for name, value in values.items())


def _number(value: float) -> str:
    """Format a number with nearly constant width, so that the bar does not jump."""
    if isinstance(value, int) or not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:.2e}"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d} min"


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _bar_type() -> type[tqdm[Any]]:
    base: Any
    if in_notebook():
        from tqdm.auto import tqdm as base
    else:
        from tqdm import tqdm as base
    # The interval 0 turns off tqdm's monitor thread, which would redraw the bar by itself.
    return type("Bar", (base,), {"monitor_interval": 0})


_NEVER = math.inf


class TQDMProgressBar(Callback):
    """Callback that shows epoch, batches, speed, remaining time and logged values, on the main process.

    The values are those logged with `prog_bar=True` and those that a callback monitors.

    On a terminal or in a notebook the bar is redrawn by time. Between two redraws a batch only reads the clock, and
    logged tensors are read from the device only when they are shown. If the output goes to a file or a pipe, the
    callback prints one line per epoch, and one per minute within a long epoch.

    Args:
        refresh_rate: Redraw only after a multiple of this number of batches. 0 turns the bar off.
        process_position: The number of lines to leave free above the bar, for bars of other processes.
        leave: Keep the bar of each epoch on the screen and start a new one.
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
                raise ConfigurationError(f"TQDMProgressBar({name}={number}): {name} must be at least 0.")
        self.refresh_rate: float = refresh_rate
        self._batches_between = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self.refresh_seconds = refresh_seconds
        self._enabled = True
        self._display: Display | None = None  # None on other processes and between runs
        self._due = _NEVER  # time of the next redraw, by `perf_counter`
        self._stages: list[Stage] = []
        self._monitored: list[str] = []
        self._began = (0.0, 0.0)  # time and fraction done when training began
        self._stage = Stage("")  # the innermost stage

    # public methods

    @property
    def is_enabled(self) -> bool:
        """True unless the bar was turned off, by `disable` or by `refresh_rate=0`."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """True if the bar was turned off, by `disable` or by `refresh_rate=0`."""
        return not self.is_enabled

    def enable(self) -> None:
        """Turn the progress bar on.

        Takes effect when `fit`, `validate`, `test` or `predict` is called next.
        """
        self._enabled = True

    def disable(self) -> None:
        """Turn the progress bar off, and remove a bar that is currently shown."""
        self._enabled = False
        self._stop()

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Print values above the progress bar, or normally if no bar is shown.

        Args:
            *args: Values to print.
            sep: The text between the values.
            end: The text after the last value.
            file: The stream to print to, such as `sys.stderr`. If None, the standard output.
        """
        text = sep.join(map(str, args)) + end
        if self._display is not None:
            self._display.write(text, file)
        else:
            print_text(text, end="", file=file)

    def hidden(self) -> AbstractContextManager[Any]:
        """Return a context manager that hides the progress bar, so that others may write to the terminal."""
        return nullcontext() if self._display is None else self._display.hidden()

    def get_metrics(self, trainer: Trainer, task: Any) -> dict[str, Any]:
        """Return the metric values to show next to the progress bar.

        Override this method to show other values. It is called on the main process only, each time the bar is drawn.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.

        Returns:
            A dict from names to numbers, tensors or text: the values logged with `prog_bar=True` and those that a
            callback monitors.
        """
        shown = dict(trainer.progress_bar_metrics)
        if self._monitored:
            known = trainer.logged.callback_values()
            shown |= {name: known[name] for name in self._monitored if name in known and name not in shown}
        return shown

    # all stages

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
        # Metrics that another callback monitors are shown even if they were logged without `prog_bar=True`.
        names = (getattr(callback, "monitor", None) for callback in trainer.callbacks)
        self._monitored = [name for name in dict.fromkeys(names) if isinstance(name, str)]
        batches = trainer.num_training_batches
        of_epoch = trainer.progress.batches_in_epoch / batches if batches else 0.0
        self._began = (perf_counter(), share_done(trainer, of_epoch))

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        last = trainer.max_epochs
        # Epochs are counted from 0, so the last one is `max_epochs - 1`.
        of = f"/{last - 1}" if last is not None and last > 0 else ""
        before = trainer.progress.batches_in_epoch
        epoch = Stage(
            f"Epoch {trainer.current_epoch}{of}", [trainer.num_training_batches], is_epoch=True, before=before
        )
        if self._stages and not self.leave:
            epoch.bar = self._stages.pop().bar  # reuse the bar of the last epoch
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
            self._finish(trainer)

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

    # helpers

    def _begin(self, trainer: Trainer, stage: Stage) -> None:
        if self._display is None:
            return
        if self._stages:
            self._draw_now(trainer)  # the outer bar is not redrawn during the inner stage
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
            return {}  # during an evaluation, these would be values of the training before
        # Then the trackers read the values of this step without waiting for the device once more.
        trainer.logged.copy_step_values()
        return to_numbers(self.get_metrics(trainer, trainer.task))

    def _estimate(self, trainer: Trainer) -> None:
        stage, (began, share) = self._stage, self._began
        if not stage.is_epoch or not began:
            return
        total = stage.total
        now = share_done(trainer, stage.all_done / total if total else 0.0)
        taken = perf_counter() - began
        stage.left = taken / (now - share) * (1 - now) if share < now < 1 else None

    def _finish(self, trainer: Trainer) -> None:
        assert self._display is not None
        stage, values = self._stage, self._values(trainer)
        self._display.finish(stage, values)
        if stage.passing:
            return
        if is_configured() and not in_notebook():
            with self.hidden():
                report(stage.summary(values), epoch=trainer.current_epoch, step=trainer.global_step, values=values)
        else:
            collect(stage.summary(values))

    def _end(self, trainer: Trainer) -> None:
        if self._display is None or not self._stages:
            return
        self._finish(trainer)
        stage = self._stages.pop()
        self._display.close(stage)
        if self._stages:
            self._stage = self._stages[-1]
            # The validation must not lower the speed that the epoch's bar shows.
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
    shares = [trainer.control.share_of_duration]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        shares.append((trainer.current_epoch + of_epoch) / trainer.max_epochs)
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    # The furthest of epochs, steps and time counts.
    return min(1.0, max(shares))
